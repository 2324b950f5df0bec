"""Advantages of samples against numbers worked by hand."""

import math
import statistics
from contextlib import nullcontext

import pytest
import torch

from grpo_dist.algorithms.advantages import (
    ADVANTAGE_INPUTS,
    ADVANTAGES,
    dr_grpo,
    flash_reinforce,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    rloo_normalized,
)
from grpo_dist.algorithms.normalise import normalise_rewards, whiten
from grpo_dist.config import AlgorithmConfig
from tests.support.numbers_by_hand import INF, NAN, close, tensor

OF_ANY_REWARD = sorted(set(ADVANTAGES) - {"maxrl"})  # maxrl takes 0 and 1 only
GROUP_RELATIVE = sorted(set(OF_ANY_REWARD) - {"reinforce_pp", "flash_reinforce", "remax"})
RIGHT = tensor(1, 0, 0, 1, 0, 0, 0, 0)
ONE = torch.zeros(8, dtype=torch.long)
LENGTHS = torch.tensor([5, 3, 1, 4, 2, 5, 2, 3])


def advantages(name, rewards, groups, std="group", **inputs):
    """Call an estimator with equal lengths, k = 2 and the reward as the only part."""
    values = {
        "std": std, "eps": 1e-6, "k": 2, "lengths": torch.full_like(groups, 3), "parts": rewards[None],
        "weights": torch.ones(1), "baselines": torch.zeros_like(rewards),
    } | inputs  # fmt: skip
    return ADVANTAGES[name](rewards, groups, **{n: values[n] for n in ADVANTAGE_INPUTS.get(name, ())})


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_traits_of_an_estimator_say_what_it_reads_and_learns_from(name):
    """One group whose parts and baselines all differ, next to a group of two wrong samples."""

    def estimate(*rewards):
        other = torch.arange(len(rewards) + 2, dtype=torch.float32)
        return advantages(
            name, tensor(*rewards, 0, 0), torch.tensor([0] * len(rewards) + [1, 1]),
            parts=other[None], baselines=other + 2,
        )[: len(rewards)]  # fmt: skip

    traits = AlgorithmConfig(advantage=name).advantage.traits
    assert bool(estimate(1, 1, 1, 1).any()) == traits.learns_from_equal_rewards
    assert bool(estimate(1).any()) == (not traits.needs_group)
    assert ("baselines" in ADVANTAGE_INPUTS[name]) == traits.reads_greedy_answer
    assert ("parts" in ADVANTAGE_INPUTS[name]) == traits.reads_each_reward
    assert (traits.reads_greedy_answer or traits.reads_each_reward) == (traits.other_rewards is not None)
    with pytest.raises(ValueError) if traits.only_right_and_wrong else nullcontext():
        estimate(1, 0.5, 0, 0)


TWO = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("estimator", "settings", "right", "wrong"),
    [
        (grpo, {}, 1.6201816, -0.5400605),  # eps 1e-6: verl and ROLL
        (grpo, {"eps": 1e-9}, 1.6201851, -0.5400617),  # OpenRLHF
        (grpo, {"eps": 1e-4}, 1.6198353, -0.5399451),  # TRL and ms-swift
        (grpo, {"std": "batch"}, 1.6201816, -0.5400605),  # one group is the batch
        (grpo, {"std": "batch_raw"}, 1.6201816, -0.5400605),
        (rloo, {}, 0.8571429, -0.2857143),
        (rloo_normalized, {}, 2.2677808, -0.5855388),
        (dr_grpo, {}, 0.75, -0.25),
        (flash_reinforce, {}, 0.75, -0.25),
        (opo, {"lengths": LENGTHS}, 0.64, -0.36),
        (opo, {"lengths": torch.full((8,), 7)}, 0.75, -0.25),
    ],
)
def test_advantages_have_their_golden_values(estimator, settings, right, wrong):
    """Values of other trainers were recorded by calling their functions."""
    close(estimator(RIGHT, ONE, **settings), torch.where(RIGHT == 1, right, wrong), 2e-7)


@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3, 1e-8, 12345.678, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_give_exact_zeros(reward, size, std):
    groups = torch.arange(3).repeat_interleave(size)
    rewards = torch.full((3 * size,), reward)
    for name in GROUP_RELATIVE:
        assert torch.equal(advantages(name, rewards, groups, std), torch.zeros(3 * size)), name
    # Also next to a group whose rewards differ.
    rewards[0] += 1
    assert torch.equal(grpo(rewards, groups, std=std)[size:], torch.zeros(2 * size))


def test_others_that_are_equal_divide_nothing():
    """NeMo-RL does not scale without variation. In a pair, the one other sample has no variation either."""
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    third = -1 / math.sqrt(3)
    got = rloo_normalized(tensor(1, 0, 0, 0, 0.7, 0.1), groups, eps=1e-12)
    close(got, tensor(1, third, third, third, 0.6, -0.6), 2e-7)
    equal = rloo_normalized(tensor(0.1, 0.7, 0.7, 0.7), groups[:4], eps=1e-12)
    close(equal[:1], tensor(-0.6), 2e-7)  # rounding is no variation


def test_single_samples_are_compared_with_the_mean_of_the_step():
    """The mean of [2, 0, 1] is 1. Unscored samples are excluded, and equal rewards teach nothing."""
    close(flash_reinforce(tensor(2, NAN, 0, 1), torch.arange(4)), tensor(1, 0, -1, 0))
    assert flash_reinforce(torch.full((7,), 0.7), torch.arange(7)).tolist() == [0.0] * 7


def test_a_nan_reward_is_left_out_of_the_statistics_and_gets_no_advantage():
    rewards, groups = tensor(1, NAN, 0, 0, NAN, NAN), torch.tensor([0, 0, 0, 1, 1, 1])
    third = 1 / math.sqrt(0.5)
    close(grpo(rewards, groups, eps=0.0), tensor(0.5 * third, 0, -0.5 * third, 0, 0, 0))
    close(dr_grpo(rewards, groups), tensor(0.5, 0, -0.5, 0, 0, 0))
    close(rloo(rewards, groups), tensor(1, 0, -1, 0, 0, 0))


def test_a_lone_sample_and_an_empty_batch_have_no_advantage():
    for name in GROUP_RELATIVE:
        assert advantages(name, tensor(5.0), torch.tensor([3])).tolist() == [0.0]
    for name in ADVANTAGES:
        assert advantages(name, tensor(), torch.tensor([], dtype=torch.long)).tolist() == []


@pytest.mark.parametrize("name", OF_ANY_REWARD)
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_non_finite_reward_gets_no_advantage_and_is_left_out_of_the_statistics(name, bad):
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 0])
    whole = tensor(1, 0, 0, 2, 1, 0, bad)
    got = advantages(name, whole, groups)
    assert got[-1] == 0.0 and got.isfinite().all()
    assert torch.equal(got[:-1], advantages(name, whole[:-1], groups[:-1]))


def test_the_batch_deviation_is_that_of_all_centred_rewards():
    rewards, groups = tensor(1, 0, NAN, 6, 2, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    centred = [0.5, -0.5, 2.0, -2.0, 0.0]
    a, b, c, d, e = (v / (statistics.stdev(centred) + 1e-6) for v in centred)
    close(grpo(rewards, groups, std="batch"), tensor(a, b, 0, c, d, e))


def test_the_deviation_of_the_batch_is_that_of_centred_or_of_raw_rewards():
    """TRL's scale_rewards = batch and ROLL's norm_std_type = batch use raw rewards."""
    rewards, groups = tensor(1, 0, 5, 4), torch.tensor([0, 0, 1, 1])
    unit = [0.5, -0.5, 0.5, -0.5]
    centred, raw = statistics.stdev(unit), statistics.stdev([1, 0, 5, 4])
    close(grpo(rewards, groups, std="batch", eps=0.0), tensor(*(u / centred for u in unit)), 1e-6)
    close(grpo(rewards, groups, std="batch_raw", eps=0.0), tensor(*(u / raw for u in unit)), 1e-6)


def test_an_unknown_deviation_is_refused():
    with pytest.raises(ValueError, match="std = 'population': expected group, batch or none"):
        grpo(tensor(0, 1), torch.zeros(2, dtype=torch.long), std="population")


def test_remax_subtracts_the_greedy_answers_reward():
    rewards, baselines = tensor(1, 0, NAN, 1), tensor(0.25, 0.25, 1, NAN)
    close(remax(rewards, torch.tensor([0, 0, 1, 1]), baselines=baselines), tensor(0.75, -0.25, 0, 0))


def test_reinforce_pp_and_its_baseline_form_are_whitened_over_tokens():
    mask = torch.arange(5) < LENGTHS[:, None]
    spread = reinforce_pp_baseline(RIGHT, ONE)[:, None].expand(8, 5)
    white = whiten(spread, mask)
    close(white[0], tensor(*[1.3063945] * 5), 2e-7)
    close(white[1], tensor(*[-0.7348470] * 3, 0, 0), 2e-7)
    # Without the group's mean: whitening subtracts a mean anyway, here the same one.
    close(whiten(reinforce_pp(RIGHT, ONE)[:, None].expand(8, 5), mask), white, 1e-6)


def test_pass_at_k_has_the_papers_values_for_right_and_wrong():
    close(pass_at_k(tensor(1, 0, 0, 0), ONE[:4], k=2, eps=0.0), tensor(1, -1 / 3, -1 / 3, -1 / 3), 1e-7)
    with pytest.raises(ValueError, match="k = 0: expected at least 1"):
        pass_at_k(RIGHT, ONE, k=0)


def test_gdpo_distinguishes_samples_whose_rewards_have_the_same_sum():
    """Right answers in a bad format and wrong ones in a good format: the sum is 1 for both."""
    parts = tensor(1, 1, 0, 0), tensor(0, 0, 0, 1)
    weights = tensor(1, 1)
    total = parts[0] + parts[1]
    assert total[0] == total[3]
    got = gdpo(total, ONE[:4], parts=torch.stack(parts), weights=weights)
    assert got[0] != got[3] and got[0] == got[1]
    silent = torch.cat([torch.stack(parts), tensor(1, 1, 1, 0, 0, 0).view(2, 3)], dim=1)
    with_silent = gdpo(silent.sum(0), torch.tensor([0, 0, 0, 0, 1, 1, 1]), parts=silent, weights=weights)
    assert with_silent[4:].tolist() == [0.0, 0.0, 0.0]
    each = [(v - 0.5) / (1 / math.sqrt(3)) for v in (1, 1, 0, 0)], [(v - 0.25) / 0.5 for v in (0, 0, 0, 1)]
    summed = [a + b for a, b in zip(*each, strict=True)]
    deviation = statistics.stdev(summed)
    close(got, tensor(*(s / deviation for s in summed)), 1e-5)


def test_advantages_keep_the_dtype_of_rewards_and_do_not_modify_them():
    rewards = tensor(1, 0, NAN)
    before = rewards.clone()
    groups = torch.zeros(3, dtype=torch.int32)
    for name in ADVANTAGES:
        assert advantages(name, rewards, groups).dtype == torch.float32
        assert advantages(name, rewards.double(), groups).dtype == torch.float64
    assert torch.equal(rewards.nan_to_num(9), before.nan_to_num(9))


@pytest.mark.parametrize("name", OF_ANY_REWARD)
def test_integer_rewards_are_not_truncated(name):
    groups, values = torch.tensor([0, 0, 0, 1, 1, 1]), (3, 0, 1, 2, 0, 0)
    got = advantages(name, torch.tensor(values), groups)
    assert got.dtype == torch.float32
    close(got, advantages(name, tensor(*values), groups), 1e-7)
    whole = normalise_rewards(torch.tensor(values), groups, over="group")
    close(whole, normalise_rewards(tensor(*values), groups, over="group"), 1e-12)


def test_gpg_makes_up_for_the_samples_of_equal_rewards():
    rewards = tensor(1, 0, 0, 0, 1, 1, 1, 1)
    close(gpg(rewards, TWO), tensor(1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0))  # 8 / (8 - 4) times the centred
    rewards = tensor(1, 0, 0, 0, 1, 1, 0, 0)
    assert torch.equal(gpg(rewards, TWO), dr_grpo(rewards, TWO))  # no zero-variance group: scale 1
    # A sample at the mean of its group counts; an unscored sample does not.
    close(gpg(tensor(0, 0.5, 1, NAN, 2, 2, 2, INF), TWO), tensor(-1, 0, 1, 0, 0, 0, 0, 0))


def test_the_mean_gradient_of_gpg_does_not_depend_on_groups_without_a_signal():
    alone = gpg(tensor(1, 0, 0, 1, 0), torch.zeros(5, dtype=torch.long))
    more = gpg(tensor(1, 0, 0, 1, 0, *[1] * 15), torch.tensor([0] * 5 + [1] * 15))
    close(more[:5] / 20, alone / 5)


def test_maxrl_divides_by_the_pass_rate():
    close(maxrl(tensor(1, 0, 0, 0, 1, 1, 0, 0), TWO), tensor(3, -1, -1, -1, 1, 1, -1, -1))
    assert maxrl(tensor(0, 0, 0, 0, 1, 1, 1, 1), TWO).tolist() == [0.0] * 8
    close(maxrl(tensor(1, NAN, 0, 0, -INF, 1, 0, 0), TWO), tensor(2, 0, -1, -1, 0, 2, -1, -1))
    assert maxrl(torch.tensor([1, 0, 0, 0]), TWO[:4]).tolist() == [3.0, -1.0, -1.0, -1.0]


def test_maxrl_is_the_gradient_of_the_log_likelihood_of_a_right_answer():
    """Exact, over all groups of N samples of a policy that is right with probability p: the expected gradient
    with respect to p's logit is the gradient of -(sum over k from 1 to N - 1 of (1 - p)^k / k).
    """
    p, size = 0.3, 4
    expected = p * (1 - p) * sum((1 - p) ** (k - 1) for k in range(1, size))
    total = 0.0
    for right in range(size + 1):
        rewards = tensor(*[1.0] * right, *[0.0] * (size - right), dtype=torch.float64)
        scores = torch.where(rewards == 1, 1 - p, -p).double()  # d log pi / d logit
        terms = maxrl(rewards, torch.zeros(size, dtype=torch.long)) * scores
        total += math.comb(size, right) * p**right * (1 - p) ** (size - right) * float(terms.mean())
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reward", [0.5, 2.0, -1.0])
def test_maxrl_refuses_rewards_that_are_not_right_or_wrong(reward):
    with pytest.raises(ValueError, match=f"reward {reward:g}: expected 0 or 1; use a single reward"):
        maxrl(tensor(1, 0, reward), torch.zeros(3, dtype=torch.long))


def test_grpo_passk_rewards_the_best_alone_by_its_lead():
    rewards = tensor(0.5, 3, 1, 1, 4, 4, 0, 0)
    lead = 3 - 1
    expected = [0, lead / statistics.stdev([0.5, 3, 1, 1]), 0, 0, 0, 0, 0, 0]  # none for two equal best
    close(grpo_passk(rewards, TWO, eps=0.0), tensor(*expected))
    close(grpo_passk(rewards, TWO, std="none"), tensor(0, 2, 0, 0, 0, 0, 0, 0))
    close(grpo_passk(tensor(1, NAN, INF, -2), TWO[:4], std="none"), tensor(3, 0, 0, 0))
    assert grpo_passk(tensor(7.0), torch.tensor([2])).tolist() == [0.0]
    with pytest.raises(ValueError, match="std = 'max': expected group, batch or none"):
        grpo_passk(rewards, TWO, std="max")
