"""Encodes many texts: each distinct word is encoded once.

A byte-level tokenizer splits a text into words before it merges tokens, and no word continues past a single
space or line break between two other characters. So we split there, and encode the parts alone:

    "Find the number\nof" -> "Find", " the", " number\n", "of"

Where the tokenizer splits digits, so do we: "x2y" -> "x", "2", "y".

numpy and Arrow find and count the words, and numpy joins their tokens: no Python object per text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from itertools import chain, count
from typing import Any

import numpy as np

from grpo_dist.chat.template import encode_all, is_of_library, writes_date

_REMEMBERED = 2**18  # words
_FEW = 500  # texts; for fewer, importing Arrow does not pay
_AT_ONCE = 4096  # texts at once: their arrays fit into a CPU's cache
# Patterns that split text into words, of Llama 3, Qwen 2, Qwen 3.5 and gpt-oss; the library has GPT-2's. No
# branch has a space after another character, except for white space.
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
_SINGLE_DIGIT = _PATTERNS[1:3]
# Bytes that cannot end, or begin, a white space character: Unicode's begin with C2, E1, E2 or E3, and end
# with a byte up to AF.
_LASTS = np.array([0x21 <= byte < 0x7F or byte > 0xAF for byte in range(256)])
_BEGINS = np.array([0x21 <= byte < 0x7F or 0xC3 <= byte < 0xE1 or byte > 0xE3 for byte in range(256)])


class BatchEncoder:
    """Encodes texts as `encode_all` does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._backend = tokenizer, _backend(tokenizer)
        settings = {} if self._backend is None else json.loads(self._backend.to_str())
        self._is_cut = bool(settings) and cuts_at_spaces(settings)
        self._cuts_digits = self._is_cut and cuts_out_digits(settings)
        self._words: dict[bytes, int] = {}  # word -> number
        self._ids, self._ends = np.empty(0, np.int32), np.zeros(1, np.int64)  # per word, after a 0

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of all texts, int32, and the end of each, int64 [texts]."""
        if not self._is_cut or len(texts) < _FEW:
            return self._encode(texts)
        parts = [self._encode_words(texts[at : at + _AT_ONCE]) for at in range(0, len(texts), _AT_ONCE)]
        sizes = np.cumsum([0, *(len(ids) for ids, _ in parts)])
        ends = [ends + size for (_, ends), size in zip(parts, sizes, strict=False)]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate(ends)

    def _encode_words(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        import pyarrow as pa  # heavy: few texts do not need it

        if not any(texts):
            return np.empty(0, np.int32), np.zeros(len(texts), np.int64)
        sizes = list(map(len, texts))
        content = "".join(texts).encode()
        if len(content) > sum(sizes):
            sizes = [len(text.encode()) for text in texts]
        text_ends = np.cumsum(sizes)
        cuts = find_words(np.frombuffer(content, np.uint8), text_ends, digits=self._cuts_digits)
        offsets = pa.py_buffer(np.append(cuts, len(content)))
        words = pa.Array.from_buffers(pa.large_binary(), len(cuts), [None, offsets, pa.py_buffer(content)])
        coded = words.dictionary_encode()
        codes = np.frombuffer(coded.indices.buffers()[1], np.int32, len(cuts))
        numbers = self._numbers(coded.dictionary.to_pylist())[codes]
        begins, sizes_of_words = self._ends[numbers], self._ends[numbers + 1] - self._ends[numbers]
        ends = np.cumsum(sizes_of_words)
        places = np.repeat(begins - ends + sizes_of_words, sizes_of_words)
        places += np.arange(len(places))
        return self._ids[places], np.append(0, ends)[np.searchsorted(cuts, text_ends)]

    def _numbers(self, words: list[bytes]) -> np.ndarray:
        """Return the numbers of ``words``, int64, and remember their ids."""
        unknown = [word for word in words if word not in self._words]
        if len(self._words) + len(unknown) > _REMEMBERED:
            self._words.clear()
            self._ids, self._ends, unknown = self._ids[:0], self._ends[:1], words
        ids, ends = self._encode(list(map(bytes.decode, unknown)))
        self._words.update(zip(unknown, count(len(self._words)), strict=False))
        self._ends = np.concatenate([self._ends, ends + len(self._ids)])
        self._ids = np.concatenate([self._ids, ids])
        return np.fromiter(map(self._words.__getitem__, words), np.int64, len(words))

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self._backend is None:
            ids = encode_all(texts, self._tokenizer)
        else:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
        ends = np.cumsum(list(map(len, ids)), dtype=np.int64)
        return np.fromiter(chain.from_iterable(ids), np.int32, ends[-1] if len(ends) else 0), ends


def find_words(content: np.ndarray, ends: np.ndarray, *, digits: bool) -> np.ndarray:
    """Return the starts of words, int64: of texts, and of parts after a single space or line break.

    Args:
        content: UTF-8 of the concatenated texts, uint8.
        ends: end of each text, int64.
        digits: whether each digit is a word, unless white space is before it.
    """
    size = len(content)
    begins_text, begins_word = np.zeros(size + 1, bool), np.zeros(size + 1, bool)
    begins_text[0], begins_text[ends] = True, True
    begins_word |= begins_text
    for byte, further in ((b" ", 0), (b"\n", 1)):  # a space belongs to the word after it
        places = np.flatnonzero(content[1:-1] == byte[0]) + 1
        is_single = _LASTS[content[places - 1]] & _BEGINS[content[places + 1]]
        is_single &= ~(begins_text[places] | begins_text[places + 1])
        if further:  # some patterns take a line break and the next slash as one
            is_single &= content[places + 1] != ord("/")
        begins_word[places[is_single] + further] = True
    if digits:
        is_digit = (content >= ord("0")) & (content <= ord("9"))
        begins_word[1:] |= is_digit
        begins_word[1:size] |= is_digit[1:] & _LASTS[content[:-1]]
    return np.flatnonzero(begins_word[:size])


def as_bytes(ids: Sequence[int]) -> bytes:
    """Return ``ids`` as int32."""
    return np.array(ids, np.int32).tobytes()


def tokenizer_state(tokenizer: Any, day: date | None) -> list[Any] | None:
    """Return what determines the ids of texts and conversations, as JSON values; None: unknown. ``day``: what
    the chat template writes as today's date; None: today.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not is_of_library(tokenizer):
        return None
    text = [type(tokenizer).__name__, backend.to_str(), tokenizer.init_kwargs, tokenizer.chat_template]
    versions = [version(name) for name in ("transformers", "tokenizers")]
    return [text, versions, str(day or date.today()) if writes_date(tokenizer) else ""]


def cuts_at_spaces(settings: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer with ``settings``, its `tokenizer.json`, splits a text at each single space
    and line break.
    """
    model, normalizer = settings["model"], settings["normalizer"]
    if model.get("type") != "BPE" or model.get("dropout") or (normalizer or {}).get("type", "NFC") != "NFC":
        return False
    if any(t["lstrip"] or t["rstrip"] or set(" \n") & set(t["content"]) for t in settings["added_tokens"]):
        return False
    steps = settings["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds[:-1]:  # it writes each space as a letter, which later patterns read
        return False
    is_cut = [_cuts(step) for step in steps]
    return None not in is_cut and True in is_cut


def cuts_out_digits(settings: Mapping[str, Any]) -> bool:
    """Return whether a `tokenizer.json` for which `cuts_at_spaces` holds makes a word of each digit."""
    if any(t["single_word"] or set("0123456789") & set(t["content"]) for t in settings["added_tokens"]):
        return False
    step = settings["pre_tokenizer"]
    first = step["pretokenizers"][0] if step["type"] == "Sequence" else step
    if first["type"] == "Digits":
        return bool(first["individual_digits"])
    return first["type"] == "Split" and first["pattern"].get("Regex") in _SINGLE_DIGIT


def _cuts(step: dict[str, Any]) -> bool | None:
    """Return whether a step of a pre-tokenizer splits at each single space; None: an unknown step."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return bool(step["use_regex"])
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return True if step["pattern"].get("Regex") in _PATTERNS else None
    return False if kind == "Digits" else None


def _backend(tokenizer: Any) -> Any:
    """Return the tokenizer of `tokenizers` that ``tokenizer`` merely wraps; None where it may do more."""
    from transformers import PreTrainedTokenizerFast  # heavy, but every tokenizer has imported it

    base, kind = PreTrainedTokenizerFast, type(tokenizer)
    if not issubclass(kind, base) or any(
        getattr(kind, name) is not getattr(base, name) for name in ("__call__", "_encode_plus")
    ):
        return None
    tokenizer("1", add_special_tokens=False)  # sets truncation, padding, and how special tokens are read
    return tokenizer.backend_tokenizer
