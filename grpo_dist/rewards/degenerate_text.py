"""Detects degenerate text: a collapsed policy repeats itself or writes unreadable characters."""

from __future__ import annotations

import unicodedata
import zlib
from collections import Counter

_TAIL = 2048  # characters: loops occur at the end, and the beginning may be fine
_SHORTEST = 256  # bytes: shorter text may repeat itself legitimately ("1, 1, 1, 1")
# Compressed share of the length. Of 100,000 real texts the few below it are loops; the next has 0.13.
_COMPRESSED = 0.1
_UNREADABLE = 0.1  # share of the characters
# Control characters, surrogates, private use, unassigned.
_NOT_TEXT = {"Cc", "Cs", "Co", "Cn"}
_WHITESPACE = frozenset("\n\r\t")


def is_degenerate(text: str) -> bool:
    """Return whether ``text`` ends in a loop, or more than a tenth of it is unreadable.

    A loop compresses well under zlib. Bytes that are not UTF-8 count as unreadable.
    """
    return _unreadable(text) or _loops(text[-_TAIL:])


def _unreadable(text: str) -> bool:
    if text.isascii() and text.isprintable():
        return False
    # One pass over the text: it may contain very many distinct characters.
    bad = sum(n for c, n in Counter(text).items() if c not in _WHITESPACE and _is_no_text(c))
    return bad > _UNREADABLE * len(text)


def _is_no_text(character: str) -> bool:
    return character == "\N{REPLACEMENT CHARACTER}" or unicodedata.category(character) in _NOT_TEXT


def _loops(text: str) -> bool:
    raw = text.encode(errors="replace")
    return len(raw) >= _SHORTEST and len(zlib.compress(raw, 6)) < _COMPRESSED * len(raw)
