"""Texts of earlier samples, from which the next tokens of another sample are guessed.

    texts     [ oldest ....... | ......... | newest ....... ]      positions count the tokens ever remembered
    heads     bucket of an n-gram -> position of its newest n-gram
    back      position            -> how far back the bucket's n-gram before it is; 0: there is none

A lookup follows these links from the newest to older ones until a position has been forgotten, so that
forgetting a text costs nothing. Other n-grams in the same bucket are passed over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_GRAM = 4  # tokens that must agree before a continuation is looked at
_PLACES = 8  # of each of these n-grams that are looked at, the newest
_LONGEST = 32  # tokens: longer agreements count as equal
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd; the golden ratio of 2^64 spreads what follows each other
_LOW = np.uint64(32)  # bits of the index in a text, in one number with the bucket


class History:
    """Sequences of tokens with an index of their n-grams. The oldest leave when ``capacity`` tokens are
    exceeded.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._next = capacity, 1  # position 0 is never a token's
        self._texts: list[NDArray[np.int32]] = []
        self._starts: list[int] = []  # position of each text's first token
        self._forgotten = 0  # of these, from the first on
        self._bits = _bucket_bits(capacity)
        # Zeros that nothing was written to take no memory.
        self._heads = np.zeros(1 << self._bits, dtype=np.int64)
        self._back = np.zeros(capacity, dtype=np.int32)

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Remember a sequence. ``tokens``: int32 [T], which is copied.

        It runs between two steps of the engine: no Python for each token.
        """
        if len(tokens) <= _GRAM:
            return
        self._forget(len(tokens))
        if len(tokens) > self._capacity:
            return
        text, start = np.array(tokens, dtype=np.int32), self._next
        self._texts.append(text)
        self._starts.append(start)
        self._next += len(text)
        self._link(self._buckets(text), start)

    def continuation(self, tokens: NDArray[np.int32], count: int) -> list[int]:
        """Guess the next tokens: at most ``count``, [] where the last n-gram of ``tokens`` is new.

        Of the places where that n-gram occurred, here or in a remembered text, the one that agrees longest
        backwards is continued; among equals the text with the longest common beginning, which is most often
        a sample of the same prompt.
        """
        if len(tokens) <= _GRAM:
            return []
        best, guess = (0, -1), tokens[:0]
        places = list(self._places(tokens[-_GRAM:]))
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

    def _forget(self, new: int) -> None:
        """Forget the oldest texts until ``new`` tokens more fit."""
        while self._forgotten < len(self._texts) and self._next + new - self._oldest > self._capacity:
            self._texts[self._forgotten] = self._texts[self._forgotten][:0]
            self._forgotten += 1
        if 2 * self._forgotten > len(self._texts):
            del self._texts[: self._forgotten], self._starts[: self._forgotten]
            self._forgotten = 0

    @property
    def _oldest(self) -> int:
        """The first position that is remembered."""
        return self._starts[self._forgotten] if self._forgotten < len(self._starts) else self._next

    def _buckets(self, text: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return the bucket of each n-gram of ``text`` [T] by its first token, [T - 3]."""
        wide, count = text.astype(np.uint64), len(text) - _GRAM + 1
        mixed = wide[:count].copy()
        for offset in range(1, _GRAM):
            mixed *= _FACTOR
            mixed ^= mixed >> _LOW
            mixed += wide[offset : offset + count]
        mixed *= _FACTOR
        return mixed >> np.uint64(64 - self._bits)

    def _link(self, buckets: NDArray[np.uint64], start: int) -> None:
        """Link the n-grams at ``start`` and after it to those of their buckets before them."""
        # Sorting numbers is much faster than sorting an index by them.
        ordered = np.sort((buckets << _LOW) | np.arange(len(buckets), dtype=np.uint64))
        bucket = (ordered >> _LOW).astype(np.int64)
        position = start + (ordered & np.uint64((1 << 32) - 1)).astype(np.int64)
        is_first = np.ones(len(ordered), dtype=bool)  # of its bucket in this text
        is_first[1:] = bucket[1:] != bucket[:-1]
        back = np.empty(len(ordered), dtype=np.int64)
        back[1:] = position[1:] - position[:-1]
        back[is_first] = position[is_first] - self._heads[bucket[is_first]]
        back[back >= self._capacity] = 0  # what is so far back has been forgotten
        self._back[position % self._capacity] = back
        is_last = np.append(is_first[1:], True)
        self._heads[bucket[is_last]] = position[is_last]

    def _places(self, gram: NDArray[np.int32]) -> Iterator[tuple[NDArray[np.int32], int]]:
        """Yield the newest texts with ``gram``, and the index after it."""
        position, oldest, found = int(self._heads[self._buckets(gram)[0]]), self._oldest, 0
        wanted = gram.tolist()
        while position >= oldest and found < _PLACES:
            number = bisect_right(self._starts, position, lo=self._forgotten) - 1
            text, end = self._texts[number], position - self._starts[number] + _GRAM
            if text[end - _GRAM : end].tolist() == wanted:
                found += 1
                yield text, end
            back = int(self._back[position % self._capacity])
            if not back:
                return
            position -= back


def history_bytes(capacity: int) -> int:
    """Return the host memory that a full `History` takes, bytes."""
    return capacity * 2 * np.dtype(np.int32).itemsize + (8 << _bucket_bits(capacity))


def _bucket_bits(capacity: int) -> int:
    """Return the logarithm of the number of buckets: one for each token, rounded up to a power of two."""
    return max(1, (capacity - 1).bit_length())


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
