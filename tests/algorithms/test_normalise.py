"""Statistics and normalisation of rewards: numbers worked by hand."""

import math
import statistics

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.moments import Moments
from grpo_dist.algorithms.normalise import length_weights, normalise_rewards, whiten
from tests.support.numbers_by_hand import NAN, close, mask_of, tensor


def test_rewards_are_shifted_and_scaled_over_group_or_batch():
    rewards, groups = tensor(1, 3, NAN, 10, 14), torch.tensor([0, 0, 0, 1, 1])

    def norm(**how):
        return normalise_rewards(rewards, groups, eps=0.0, **how)

    half = math.sqrt(0.5)
    close(norm(over="group")[[0, 1, 3, 4]], tensor(-half, half, -half, half))
    close(norm(over="group", scale=False)[[0, 1, 3, 4]], tensor(-1, 1, -2, 2))
    close(norm(over="group", shift=False)[[0, 1, 3, 4]], tensor(1, 3, 10 / 2, 14 / 2) / math.sqrt(2))
    centred = [v - 7 for v in (1, 3, 10, 14)]
    deviation = statistics.stdev(centred)
    close(norm(over="batch")[[0, 1, 3, 4]], tensor(*(c / deviation for c in centred)))
    equal = normalise_rewards(tensor(1, 1, 1, 0), torch.tensor([0, 0, 1, 1]), over="group", shift=False)
    close(equal, tensor(1, 1, math.sqrt(2), 0), 1e-5)
    assert all(math.isnan(norm(over=over)[2]) for over in ("none", "group", "batch"))
    assert norm(over="none") is rewards
    with pytest.raises(ValueError, match="reward_norm = 'step': expected none, group, batch"):
        norm(over="step")


def test_running_moments_are_those_of_all_rewards_so_far():
    steps = [(1.0, 0.0, NAN, 1.0), (0.25,), (math.inf,), (7.0, -2.0, 3.0)]
    moments = Moments()
    for step in steps:
        moments = moments.updated(np.array(step))
    finite = [v for step in steps for v in step if math.isfinite(v)]
    assert (moments.count, moments.mean) == (len(finite), pytest.approx(statistics.fmean(finite), rel=1e-12))
    assert moments.deviation == pytest.approx(statistics.stdev(finite), rel=1e-12)
    assert Moments().updated(np.array([0.1, 0.1, 0.1])).deviation == 0.0
    groups, rewards = torch.tensor([0, 0, 0]), tensor(7, NAN, 3)
    how = {"over": "running", "eps": 0.0, "moments": moments}
    shifted = [(v - moments.mean) / moments.deviation for v in (7, 3)]
    close(normalise_rewards(rewards, groups, **how)[[0, 2]], tensor(*shifted))
    scaled = [v / moments.deviation for v in (7, 3)]
    close(normalise_rewards(rewards, groups, shift=False, **how)[[0, 2]], tensor(*scaled))


def test_whitened_tokens_have_mean_0_and_deviation_1_and_equal_ones_are_0():
    mask = torch.rand(4, 6) < 0.7
    white = whiten(torch.randn(4, 6, dtype=torch.float64), mask)
    assert abs(float(white[mask].mean())) < 1e-12 and float(white[mask].std()) == pytest.approx(1, abs=1e-6)
    assert not white[~mask].any()
    assert not whiten(torch.full((4, 6), 0.7), mask).any()
    assert not whiten(torch.randn(4, 6), torch.zeros(4, 6, dtype=torch.bool)).any()


def test_whitening_leaves_out_non_finite_values():
    values, mask = torch.tensor([[1.0, NAN, 3.0], [math.inf, 5.0, 9.0]]), mask_of([3, 2], 3)
    got = whiten(values, mask)
    kept = [1.0, 3.0, 5.0]
    expected = [(v - 3) / statistics.stdev(kept) for v in kept]
    close(got, torch.tensor([[expected[0], 0, expected[1]], [0, expected[2], 0]]), 1e-6)


def test_length_weights_fall_linearly_from_the_shortest_sequence_to_the_longest():
    close(length_weights(mask_of([2, 4, 6], 6))[:, 0], [1.5, 1.0, 0.5])
    close(length_weights(mask_of([2, 2, 6], 6))[:, 0], [9 / 7, 9 / 7, 3 / 7])
    close(length_weights(mask_of([3, 3], 4))[:, 0], [1, 1])
    close(length_weights(mask_of([2, 0, 6], 6))[:, 0], [1.5, 1.0, 0.5])  # an empty sequence
    close(length_weights(mask_of([0, 0], 6))[:, 0], [1, 1])
    close(length_weights(mask_of([1, 3, 2, 1], 4), torch.tensor([0, 1, 1, 0]))[:, 0], [1.5, 0.5, 0.5, 1.5])
