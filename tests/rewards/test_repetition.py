"""The share of repeated n-grams, counted by hand."""

import numpy as np
import pytest

from grpo_dist.rewards.repetition import repeated_share


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        ([1, 2, 1, 2, 1], 2, 0.5),  # 12 21 12 21: two distinct of four
        ([1, 2, 3, 4], 2, 0.0),
        ([7, 7, 7, 7, 7], 1, 0.8),
        ([7, 7, 7, 7, 7], 4, 0.5),  # 7777 twice
        ([1, 2, 3, 1, 2, 3, 1], 3, 0.4),  # 123 231 312 123 231
        ([1, 2], 3, 0.0),
        ([], 1, 0.0),
    ],
)
def test_share_of_repeated_n_grams(tokens, n, expected):
    assert repeated_share(tokens, n=n) == pytest.approx(expected)


def test_token_ids_differ_by_all_their_bytes():
    assert repeated_share(np.array([1, 257, 65537, 16777217], np.int32), n=1) == 0.0


def test_a_loop_tends_to_one():
    looping = np.tile(np.arange(10, dtype=np.int32), 100)
    assert repeated_share(looping, n=40) == pytest.approx(1 - 10 / 961)
