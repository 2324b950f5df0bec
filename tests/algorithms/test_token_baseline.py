"""The optimal token baseline (arXiv:2602.07078): numbers worked by hand, and its definition in loops."""

import math

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.token_advantages import optimal_token_baseline, sum_so_far
from tests.support.numbers_by_hand import NAN, close, mask_of, tensor

NORMS = torch.tensor([[0.2, 0.4, 0.0], [0.6, 0.0, 0.5]], dtype=torch.float64)
ONE = torch.tensor([0, 0])


def test_each_token_has_the_mean_weighted_by_the_energy_so_far():
    """W: 0.2, 0.6 and 0.6, 0.6, 1.1; baselines 2 / 0.8 and 2.4 / 1.2; the third token is alone."""
    got = optimal_token_baseline(tensor(1, 3), ONE, NORMS, mask_of([2, 3], 3))
    close(got, [[-1.5, -1, 0], [0.5, 1, 3]], 1e-12)


def test_a_given_token_is_no_step_of_time():
    """The same samples with two given tokens behind the first token of one of them."""
    mask = torch.tensor([[True, False, False, True, False], [True, True, True, False, False]])
    norms = torch.tensor([[0.2, 9, NAN, 0.4, 9], [0.6, 0.0, 0.5, 9, 9]], dtype=torch.float64)
    got = optimal_token_baseline(tensor(1, 3), ONE, norms, mask)
    close(got, [[-1.5, 0, 0, -1, 0], [0.5, 1, 3, 0, 0]], 1e-12)


def test_the_rows_of_a_sample_are_one_sequence():
    mask, samples = torch.tensor([[True, False], [False, True], [True, True], [True, False]]), [0, 0, 1, 1]
    norms = torch.tensor([[0.2, 9], [9, 0.4], [0.6, 0.0], [0.5, 9]], dtype=torch.float64)
    got = optimal_token_baseline(tensor(1, 3), ONE, norms, mask, sequence_ids=torch.tensor(samples))
    close(got, [[-1.5, 0], [0, -1], [0.5, 1], [3, 0]], 1e-12)
    assert sum_so_far(torch.tensor([[1, 2], [4, 0], [8, 1]]), torch.tensor([5, 5, 7])).tolist() == [
        [1, 3], [7, 7], [8, 9],
    ]  # fmt: skip


def test_equal_rewards_teach_only_the_end_of_the_longest():
    rewards, groups = torch.full((3,), 0.7), torch.zeros(3, dtype=torch.long)
    got = optimal_token_baseline(rewards, groups, torch.rand(3, 4), mask_of([2, 3, 4], 4))
    assert got.count_nonzero() == 1 and float(got[2, 3]) == float(rewards[2])


def test_a_sample_without_scored_siblings_has_no_advantage_and_tokens_without_energy_the_mean():
    norms, groups = torch.zeros(5, 2), torch.tensor([0, 1, 1, 2, 2])
    got = optimal_token_baseline(tensor(4, 2, NAN, 1, 0), groups, norms, mask_of([2, 1, 2, 2, 2], 2))
    close(got, [[0, 0]] * 3 + [[0.5, 0.5], [-0.5, -0.5]])


@pytest.mark.parametrize("seed", range(4))
def test_advantages_are_those_of_the_definition_in_any_order_of_samples(seed):
    rng = np.random.default_rng(seed)
    groups = np.repeat([7, 3, 5], [4, 5, 1])
    rewards = rng.normal(1, 2, len(groups))
    rewards[rng.random(len(groups)) < 0.15] = math.nan
    norms, mask = rng.uniform(0, 2, (len(groups), 8)), rng.random((len(groups), 8)) < 0.7
    order = rng.permutation(len(groups))
    inputs = [torch.from_numpy(own[order]) for own in (rewards, groups, norms, mask)]
    got = optimal_token_baseline(*inputs).numpy()[np.argsort(order)]

    energy = [np.cumsum(own[kept]) for own, kept in zip(norms, mask, strict=True)]
    for i, places in enumerate(np.flatnonzero(own) for own in mask):
        siblings = [j for j in range(len(groups)) if groups[j] == groups[i] and math.isfinite(rewards[j])]
        for t, place in enumerate(places):
            there = [j for j in siblings if len(energy[j]) > t]
            expected = 0.0
            if i in siblings and len(siblings) > 1:
                weights = [energy[j][t] for j in there]
                mean = math.fsum(w * rewards[j] for w, j in zip(weights, there, strict=True))
                expected = rewards[i] - (mean / math.fsum(weights) if len(there) > 1 else 0.0)
            assert got[i, place] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not got[~mask].any()
