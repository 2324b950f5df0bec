"""Texts of earlier samples, from which the next tokens of another sample are guessed."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

_GRAM = 4  # tokens that must agree before a continuation is looked at
_PLACES = 8  # kept for each of these n-grams, the newest
_LONGEST = 32  # tokens: longer agreements count as equal
_ITEM = 4  # bytes of an int32


class History:
    """Sequences of tokens with an index of their n-grams. The oldest leave when ``capacity`` tokens are
    exceeded.
    """

    def __init__(self, capacity: int = 2_000_000) -> None:
        self._capacity, self._size, self._next = capacity, 0, 0
        self._texts: OrderedDict[int, NDArray[np.int32]] = OrderedDict()
        # n-gram -> (number of the text, position after the n-gram), newest last
        self._index: dict[bytes, list[tuple[int, int]]] = {}

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Remember a sequence. ``tokens``: int32 [T], which is copied."""
        if len(tokens) <= _GRAM:
            return
        number, self._next = self._next, self._next + 1
        self._texts[number] = np.array(tokens, dtype=np.int32)
        self._size += len(tokens)
        for end, gram in _grams(self._texts[number]):
            places = self._index.setdefault(gram, [])
            places.append((number, end))
            del places[:-_PLACES]
        while self._size > self._capacity:
            self._forget_oldest()

    def continuation(self, tokens: NDArray[np.int32], count: int) -> list[int]:
        """Guess the next tokens: at most ``count``, [] where the last n-gram of ``tokens`` is new.

        Of the places where that n-gram occurred, here or in a remembered text, the one that agrees longest
        backwards is continued; among equals the text with the longest common beginning, which is most often
        a sample of the same prompt.
        """
        if len(tokens) <= _GRAM:
            return []
        best, guess = (0, -1), tokens[:0]
        gram = tokens[-_GRAM:].astype(np.int32).tobytes()
        places = [(self._texts[number], end) for number, end in reversed(self._index.get(gram, []))]
        places += [(tokens, end) for end in _own_places(tokens)]
        for text, end in places:
            following = text[end : end + count]
            score = (
                _agreement(text[:end][::-1], tokens[::-1], _LONGEST),
                _agreement(text, tokens, len(tokens)),
            )
            if len(following) and score > best:
                best, guess = score, following
        return [int(token) for token in guess]

    def _forget_oldest(self) -> None:
        number, text = self._texts.popitem(last=False)
        self._size -= len(text)
        for _, gram in _grams(text):
            places = [place for place in self._index.get(gram, []) if place[0] != number]
            if places:
                self._index[gram] = places
            else:
                self._index.pop(gram, None)


def _grams(text: NDArray[np.int32]) -> list[tuple[int, bytes]]:
    """Return each n-gram with the position after it."""
    data = text.tobytes()
    return [(end, data[_ITEM * (end - _GRAM) : _ITEM * end]) for end in range(_GRAM, len(text) + 1)]


def _own_places(tokens: NDArray[np.int32]) -> list[int]:
    """Return the last few positions after the n-gram that ends ``tokens``, without the end itself."""
    starts = len(tokens) - _GRAM
    same = np.ones(starts, dtype=bool)
    for offset in range(_GRAM):
        same &= tokens[offset : offset + starts] == tokens[starts + offset]
    return [int(start) + _GRAM for start in np.flatnonzero(same)[-_PLACES:]]


def _agreement(one: NDArray[np.int32], other: NDArray[np.int32], most: int) -> int:
    """Return how many first tokens are equal, at most ``most``."""
    count = min(len(one), len(other), most)
    different = np.flatnonzero(one[:count] != other[:count])
    return int(different[0]) if len(different) else count
