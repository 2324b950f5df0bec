"""Builds a small character tokenizer with a chat template.

It is a Qwen2 tokenizer, because AutoTokenizer loads every Qwen2 model's tokenizer as one. It is byte-level,
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
    """Build a tokenizer with one token per byte and per special token: 267 tokens.

    With ``ascii_only`` it has 107 tokens, and other characters are lost. A chat renders as
    ``<|user|>2+2=<|assistant|>4<|end|>``.
    """
    from transformers import Qwen2Tokenizer  # heavy: only when the tokenizer is built

    tokenizer = Qwen2Tokenizer(
        _letters(ascii_only), [], eos_token=END, pad_token=PAD, unk_token=UNKNOWN, chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.add_tokens(_added())
    return tokenizer


def character_decoder() -> Any:
    """Build a `tokenizers.Tokenizer` that decodes like `character_tokenizer`, without transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    decoder = Tokenizer(models.BPE(_letters(ascii_only=False), []))
    decoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    decoder.decoder = decoders.ByteLevel()
    decoder.add_tokens(_added())
    return decoder


def _letters(ascii_only: bool) -> dict[str, int]:
    """Return ids of the special tokens and of byte-level BPE's characters."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # a fixed order
    characters = [letter for letter in letters if not ascii_only or letter.isascii() or letter in "ĠĊ"]
    return {token: i for i, token in enumerate([*_SPECIALS, *characters])}


def _added() -> list[Any]:
    from tokenizers import AddedToken

    return [
        *(AddedToken(text, special=True, normalized=False) for text in _SPECIALS),
        *(AddedToken(text, special=False, normalized=False) for text in _MARKS),
    ]
