"""Completions that say nothing: a policy that has collapsed repeats itself, or writes what none can read."""

from __future__ import annotations

import unicodedata
import zlib
from collections import Counter

_TAIL = 2048  # characters: loops come at the end, and the beginning may be fine
_SHORTEST = 256  # bytes: what is shorter may well repeat itself ("1, 1, 1, 1")
# Of its length. Of 100,000 real problems and solutions the few below it are loops; the next comes to 0.13.
_COMPRESSED = 0.1
_UNREADABLE = 0.1  # of the characters
# Control characters, halves of surrogate pairs, private use, not assigned.
_NOT_TEXT = {"Cc", "Cs", "Co", "Cn"}
_WHITESPACE = frozenset("\n\r\t")


def is_degenerate(text: str) -> bool:
    """Whether ``text`` ends in a loop, or a tenth of it cannot be read (bytes that are no UTF-8 among it).

    A loop is told by what zlib makes of it.
    """
    return _unreadable(text) or _loops(text[-_TAIL:])


def _unreadable(text: str) -> bool:
    if text.isascii() and text.isprintable():
        return False
    # Counted in one go: a text may well be made of as many kinds of characters as there are.
    bad = sum(n for c, n in Counter(text).items() if c not in _WHITESPACE and _is_no_text(c))
    return bad > _UNREADABLE * len(text)


def _is_no_text(character: str) -> bool:
    return character == "\N{REPLACEMENT CHARACTER}" or unicodedata.category(character) in _NOT_TEXT


def _loops(text: str) -> bool:
    raw = text.encode(errors="replace")
    return len(raw) >= _SHORTEST and len(zlib.compress(raw, 6)) < _COMPRESSED * len(raw)
