"""Advantages against numbers worked by hand and plain loops."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbers_by_hand import NAN, close, tensor

from grpo_dist.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, rloo


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [(grpo, 1.6201816, -0.5400605), (rloo, 0.8571429, -0.2857143), (dr_grpo, 0.75, -0.25)],
)
def test_advantages_have_their_golden_values(estimator, right, wrong):
    rewards = tensor(1, 0, 0, 1, 0, 0, 0, 0)
    expected = torch.where(rewards == 1, right, wrong)
    close(estimator(rewards, torch.zeros(8, dtype=torch.long)), expected, 2e-7)


@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3, 1e-8, 12345.678, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_give_exact_zeros(reward, size, std):
    groups = torch.arange(3).repeat_interleave(size)
    rewards = torch.full((3 * size,), reward)
    for name, estimator in ADVANTAGES.items():
        assert torch.equal(estimator(rewards, groups, std=std), torch.zeros(3 * size)), name
    # Beside a group that does differ, too.
    rewards[0] += 1
    assert torch.equal(grpo(rewards, groups, std=std)[size:], torch.zeros(2 * size))


def test_a_nan_reward_leaves_the_statistics_and_gets_no_advantage():
    rewards, groups = tensor(1, NAN, 0, 0, NAN, NAN), torch.tensor([0, 0, 0, 1, 1, 1])
    third = 1 / math.sqrt(0.5)
    close(grpo(rewards, groups, eps=0.0), tensor(0.5 * third, 0, -0.5 * third, 0, 0, 0))
    close(dr_grpo(rewards, groups), tensor(0.5, 0, -0.5, 0, 0, 0))
    close(rloo(rewards, groups), tensor(1, 0, -1, 0, 0, 0))


def test_a_lone_sample_and_an_empty_batch_have_no_advantage():
    for estimator in ADVANTAGES.values():
        assert estimator(tensor(5.0), torch.tensor([3])).tolist() == [0.0]
        assert estimator(tensor(), torch.tensor([], dtype=torch.long)).tolist() == []


def test_batch_deviation_is_that_of_all_centred_rewards():
    rewards, groups = tensor(1, 0, NAN, 6, 2, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    centred = [0.5, -0.5, 2.0, -2.0, 0.0]
    a, b, c, d, e = (v / (statistics.stdev(centred) + 1e-6) for v in centred)
    close(grpo(rewards, groups, std="batch"), tensor(a, b, 0, c, d, e))


def test_an_unknown_deviation_is_refused():
    with pytest.raises(ValueError, match="std = 'population': expected group, batch or none"):
        grpo(tensor(0, 1), torch.zeros(2, dtype=torch.long), std="population")


def by_hand(rewards, groups, name):
    out = []
    for reward, own in zip(rewards, groups, strict=True):
        known = [r for r, g in zip(rewards, groups, strict=True) if g == own and not math.isnan(r)]
        if math.isnan(reward) or len(known) < 2 or len(set(known)) == 1:
            out.append(0.0)
        elif name == "grpo":
            out.append((reward - statistics.fmean(known)) / (statistics.stdev(known) + 1e-6))
        elif name == "dr_grpo":
            out.append(reward - statistics.fmean(known))
        else:
            others = (sum(known) - reward) / (len(known) - 1)
            out.append(reward - others)
    return out


REWARD = st.sampled_from([0.0, 1.0, 0.5, -1.0, 0.1, NAN])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(REWARD, st.integers(0, 3)), min_size=1, max_size=24), st.randoms())
def test_advantages_equal_the_definition_in_any_order_of_samples(samples, rng):
    rng.shuffle(samples)
    rewards, groups = [r for r, _ in samples], [g for _, g in samples]
    for name, estimator in ADVANTAGES.items():
        actual = estimator(tensor(*rewards, dtype=torch.float64), torch.tensor(groups))
        close(actual, by_hand(rewards, groups, name), 1e-12)


def test_advantages_keep_the_type_of_rewards_and_leave_them_alone():
    rewards = tensor(1, 0, NAN)
    before = rewards.clone()
    for estimator in ADVANTAGES.values():
        assert estimator(rewards, torch.zeros(3, dtype=torch.int32)).dtype == torch.float32
        assert estimator(rewards.double(), torch.zeros(3, dtype=torch.int32)).dtype == torch.float64
    assert torch.equal(rewards.nan_to_num(9), before.nan_to_num(9))
