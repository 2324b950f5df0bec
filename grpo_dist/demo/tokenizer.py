"""Builds a small tokenizer of characters with a chat template.

It is a Qwen2 tokenizer, because AutoTokenizer loads any tokenizer of a Qwen2 model as one. It is byte-level,
so any text survives a round trip (after Unicode normalisation to NFC).
"""

from __future__ import annotations

from typing import Any

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unk|>"
_SPECIALS = (PAD, END, UNKNOWN, "<|system|>", "<|user|>", "<|assistant|>")
# Single tokens that decoding keeps, because rewards read them.
_MARKS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{")
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def character_tokenizer(*, ascii_only: bool = False) -> Any:
    """Build a tokenizer with one token per byte and per mark: 267 tokens.

    With ``ascii_only`` it has 107, and other characters are lost. A chat renders as
    ``<|user|>2+2=<|assistant|>4<|end|>``.
    """
    from tokenizers import AddedToken, pre_tokenizers  # heavy: only when the tokenizer is built
    from transformers import Qwen2Tokenizer

    # The 256 characters that represent bytes in byte-level BPE, in a fixed order.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [letter for letter in letters if not ascii_only or letter.isascii() or letter in "ĠĊ"]
    tokenizer = Qwen2Tokenizer(
        {token: i for i, token in enumerate([*_SPECIALS, *kept])}, [], eos_token=END, pad_token=PAD,
        unk_token=UNKNOWN, chat_template=_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIALS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in _MARKS])
    return tokenizer
