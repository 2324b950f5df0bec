"""Builds small tokenizers with a chat template: one of characters, one of word pieces.

Both are Qwen2 tokenizers, because AutoTokenizer loads any tokenizer of a Qwen2 model as one. They are
byte-level, so any text survives a round trip (after Unicode normalisation to NFC).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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
    letters = [letter for letter in _alphabet() if not ascii_only or letter.isascii() or letter in "ĠĊ"]
    return _tokenizer({token: i for i, token in enumerate([*_SPECIALS, *letters])}, [], _MARKS)


def word_tokenizer(texts: Sequence[str], *, pieces: int) -> Any:
    """Train byte-level BPE on ``texts`` with at most ``pieces`` pieces, and one token per number below 1000.

    Longer numbers are split into groups of three digits. At most ``pieces`` + 1005 tokens.
    """
    # heavy: only when the tokenizer is built
    from tokenizers import Tokenizer, models, trainers
    from transformers import Qwen2Tokenizer

    plain = Qwen2Tokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer, learner.normalizer = plain.pre_tokenizer, plain.normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=pieces, special_tokens=list(_SPECIALS), initial_alphabet=_alphabet(), show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    numbers = [str(n) for n in range(10, 1000)] + [f"{n:02}" for n in range(10)]
    model = _state(learner)
    return _tokenizer(model["vocab"], [tuple(m) for m in model["merges"]], (*_MARKS, *numbers))


def _tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]], whole: Sequence[str]) -> Any:
    from tokenizers import AddedToken  # heavy, as in `word_tokenizer`
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocabulary, merges, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in _SPECIALS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in whole])
    return tokenizer


def _alphabet() -> list[str]:
    """Return the 256 characters that represent bytes in byte-level BPE, in a fixed order."""
    from tokenizers import pre_tokenizers  # heavy, as in `word_tokenizer`

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _state(tokenizer: Any) -> dict[str, Any]:
    return json.loads(tokenizer.to_str())["model"]
