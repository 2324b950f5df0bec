"""Splits a completion into steps and locates their ends in text and tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int32

# How the scores of steps, at least one, become that of the completion.
REDUCE: dict[str, Callable[[Float[np.ndarray, " S"]], float]] = {
    "min": lambda scores: float(scores.min()),
    "mean": lambda scores: float(scores.mean()),
    "last": lambda scores: float(scores[-1]),
}


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """Split ``text`` into steps: (text of the step, character at which the next one begins).

    The steps cover ``text``: a separator and blank pieces belong to the preceding step, or to the first one.
    There is at least one step, which may be empty.

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


def token_ends(
    char_ends: Sequence[int], num_tokens: int, decoded_length: Callable[[int], int]
) -> Int32[np.ndarray, " S"]:
    """Return the index of the last token of each step, non-decreasing.

    A step ends with the token that holds its last character, even if that token continues into the next step.
    The last step ends with the last token of the completion, EOS included. Bisection needs about log2(C)
    decodings per step.

    Args:
        char_ends: character at which the following step begins, [S].
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


def decoded_length(tokenizer: Any, token_ids: Int32[np.ndarray, " C"]) -> Callable[[int], int]:
    """Return a function: number of characters in the first n of ``token_ids``, decoded like `Rollout.text`.

    A multi-byte character may span tokens. While incomplete it decodes to replacement characters, which are
    not counted, so it belongs to the last of its tokens.
    """
    ids = token_ids.tolist()

    def length(n: int) -> int:
        text = tokenizer.decode(ids[:n], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return len(text.rstrip("\ufffd"))

    return length
