"""ROLL at 8eb27cc, `agg_loss("token-mean")`: the sum runs over all tokens, and only the denominator uses the
mask. For lengths [5, 3, 1, 4, 2, 5, 2, 3] of 5 and losses 0.0, 0.1, ... 3.9 it is 3.12 instead of 1.796, and
filters that mask samples have no effect.
"""

import pytest
import torch

from grpo_dist.algorithms.aggregation import MODES, aggregate

LENGTHS = [5, 3, 1, 4, 2, 5, 2, 3]
LOSSES = torch.arange(40.0).view(8, 5) / 10
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]


def ours(mode, mask=MASK, losses=LOSSES):
    tokens, sequences = float(mask.sum()), float(mask.any(dim=1).sum())
    return float(aggregate(losses, mask, mode, num_tokens=tokens, num_sequences=sequences, max_tokens=5))


def test_the_bug_adds_up_masked_tokens():
    assert float(LOSSES.sum() / MASK.sum()) == pytest.approx(3.12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.796), ("seq-mean-token-mean", 1.85625), ("seq-mean-token-sum", 5.6125),
        ("seq-mean-token-sum-norm", 1.1225), ("prompt-mean-token-mean", 1.85625),
    ],
)  # fmt: skip
def test_each_mode_has_its_value_of_unmasked_tokens(mode, expected):
    assert ours(mode) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_masked_sample_counts_for_nothing(mode):
    filtered = MASK.clone()
    filtered[0] = False
    assert ours(mode, filtered) == pytest.approx(ours(mode, MASK[1:], LOSSES[1:]), rel=1e-6)
