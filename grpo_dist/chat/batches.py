"""Encodes many texts: words that occur again are encoded once.

A byte-level tokenizer cuts a text into words before it looks for tokens, and no word goes on behind a single
space between two other characters. So the tokens of a text are those of its parts between such spaces:

    "Find the number" -> "Find", " the", " number"
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np

from grpo_dist.chat.template import encode_all, is_of_library, writes_date

_REMEMBERED = 2**18  # words
# Patterns after which text is cut into words: GPT-2's is the library's own, these are of Llama 3, Qwen 2 and
# 3.5, and of gpt-oss. None of their branches has a space behind another character, but for white space.
_PATTERNS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# White space, of which versions of Unicode have U+180E or not.
_SPACES = r"\s\u180e"
_SPACED = re.compile(rf"[{_SPACES}] | [{_SPACES}]")
_SPACED_ASCII = [pair for c in map(chr, range(128)) if c.isspace() for pair in (f"{c} ", f" {c}")]
_BETWEEN = re.compile(rf"(?<=[^{_SPACES}]) (?=[^{_SPACES}])")


class BatchEncoder:
    """Encodes texts as `encode_all` does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._backend = tokenizer, _backend(tokenizer)
        self._is_cut = self._backend is not None and cuts_at_spaces(self._backend.to_str())
        self._begins: dict[str, bytes] = {}  # ids of the first word of a text
        self._words: dict[str, bytes] = {}  # of each further word, which has a space in front

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Return the ids of each text, int32."""
        if self._backend is None:
            return list(map(as_bytes, encode_all(texts, self._tokenizer)))
        if not self._is_cut:
            return self._encode(texts)
        # Line breaks around the texts show a space at the begin or the end of one.
        cut = _BETWEEN.split if _has_spaced("\n".join(["", *texts, ""])) else _split
        parts = [cut(text) for text in texts]
        begins = self._known(self._begins, "", {words[0] for words in parts})
        words = self._known(self._words, " ", set(chain.from_iterable(words[1:] for words in parts)))
        return [begins[first] + b"".join(map(words.__getitem__, further)) for first, *further in parts]

    def _known(self, known: dict[str, bytes], front: str, needed: set[str]) -> dict[str, bytes]:
        """Return a dictionary that has the ids of all ``needed`` words, with ``front`` before each."""
        unknown = list(needed - known.keys())
        if len(known) + len(unknown) > _REMEMBERED:
            known.clear()
            unknown = list(needed)
        known.update(zip(unknown, self._encode([front + word for word in unknown]), strict=True))
        return known

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        assert self._backend is not None
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [as_bytes(encoding.ids) for encoding in encodings]


def as_bytes(ids: Sequence[int]) -> bytes:
    """Return ``ids`` as int32."""
    return np.array(ids, np.int32).tobytes()


def tokenizer_state(tokenizer: Any, day: date | None) -> list[Any] | None:
    """Return all that decides the ids of a text and of a conversation, in the kinds of JSON; None: it is not
    known. ``day``: what the chat template writes as today's date; None: today.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not is_of_library(tokenizer):
        return None
    text = [type(tokenizer).__name__, backend.to_str(), tokenizer.init_kwargs, tokenizer.chat_template]
    versions = [version(name) for name in ("transformers", "tokenizers")]
    return [text, versions, str(day or date.today()) if writes_date(tokenizer) else ""]


def cuts_at_spaces(tokenizer: str) -> bool:
    """Return whether the text of a `tokenizer.json` says that it cuts a text at each single space."""
    settings = json.loads(tokenizer)
    model, normalizer = settings["model"], settings["normalizer"]
    if model.get("type") != "BPE" or model.get("dropout") or (normalizer or {}).get("type", "NFC") != "NFC":
        return False
    if any(t["lstrip"] or t["rstrip"] or " " in t["content"] for t in settings["added_tokens"]):
        return False
    steps = settings["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds[:-1]:  # it writes each space as a letter, which patterns behind it read
        return False
    is_cut = [_cuts(step) for step in steps]
    return None not in is_cut and True in is_cut


def _cuts(step: dict[str, Any]) -> bool | None:
    """Return whether a step of a pre-tokenizer cuts at each single space; None: it is not known what it
    does.
    """
    kind = step.get("type")
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return bool(step["use_regex"])
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return True if step["pattern"].get("Regex") in _PATTERNS else None
    return False if kind == "Digits" else None


def _backend(tokenizer: Any) -> Any:
    """Return the tokenizer of `tokenizers` that ``tokenizer`` calls with nothing else; None: of none is it
    known.
    """
    from transformers import PreTrainedTokenizerFast  # heavy: only where there is a tokenizer anyway

    base, kind = PreTrainedTokenizerFast, type(tokenizer)
    if not issubclass(kind, base) or any(
        getattr(kind, name) is not getattr(base, name) for name in ("__call__", "_encode_plus")
    ):
        return None
    tokenizer("1", add_special_tokens=False)  # sets truncation, padding, and how special tokens are read
    return tokenizer.backend_tokenizer


def _has_spaced(text: str) -> bool:
    """Return whether a space in ``text`` is beside white space."""
    if text.isascii():  # a tenth of the time
        return any(pair in text for pair in _SPACED_ASCII)
    return bool(_SPACED.search(text))


def _split(text: str) -> list[str]:
    return text.split(" ")
