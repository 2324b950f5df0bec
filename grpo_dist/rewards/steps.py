"""A completion as steps: where each ends in its text, and in its tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """(text of the step, character at which the next begins) of every step.

    The steps cover ``text``: a separator belongs to the step it closes, and so do blank pieces; those at the
    beginning belong to the first step. There is always one step, if only an empty one.

        "one\\n\\ntwo\\n\\n\\n\\nthree", "\\n\\n" -> ("one", 5), ("two", 12), ("three", 17)
    """
    steps: list[tuple[str, int]] = []
    begin = 0
    for piece in text.split(separator):
        begin = min(begin + len(piece) + len(separator), len(text))
        if piece.strip():
            steps.append((piece.strip(), begin))
        elif steps:
            steps[-1] = (steps[-1][0], begin)
    return steps or [("", len(text))]


def token_ends(char_ends: Sequence[int], num_tokens: int, decoded_length: Callable[[int], int]) -> np.ndarray:
    """int32 [S]: for each step the index of its last token, 0-based, not decreasing; the last is the last
    token of the completion, EOS included.

    A step ends with the token that brings its last character, also where that token goes on into the next
    step: then the next begins one token later. Found by bisection: about log2(C) decodings a step.

    Args:
        char_ends: character at which the step after begins, [S].
        num_tokens: C, at least 1.
        decoded_length: characters that the first n tokens decode to; must not decrease with n.
    """
    assert num_tokens > 0, "a completion has at least one token"
    ends, low = [], 0
    for char_end in char_ends[:-1]:
        low = bisect_left(
            range(num_tokens), char_end, lo=low, hi=num_tokens - 1, key=lambda n: decoded_length(n + 1)
        )
        ends.append(low)
    return np.array([*ends, num_tokens - 1], dtype=np.int32)


def decoded_length(tokenizer: Any, token_ids: np.ndarray) -> Callable[[int], int]:
    """Characters that the first n of ``token_ids`` decode to, as `Rollout.text` was decoded.

    A character of several bytes may be spread over tokens. While it is incomplete it decodes to replacement
    characters, which are not counted, so that it is the last of its tokens that brings it.
    """
    ids = token_ids.tolist()

    def length(n: int) -> int:
        text = tokenizer.decode(ids[:n], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return len(text.rstrip("\ufffd"))

    return length
