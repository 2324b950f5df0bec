"""GPG, MaxRL and the best-minus-second pass@k against numbers worked by hand."""

import math
import statistics

import pytest
import torch

from grpo_dist.algorithms.advantages import dr_grpo, gpg, grpo_passk, maxrl, rloo
from tests.support.numbers_by_hand import INF, NAN, close, tensor

TWO = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def test_gpg_makes_up_for_the_samples_of_equal_rewards():
    rewards = tensor(1, 0, 0, 0, 1, 1, 1, 1)
    close(gpg(rewards, TWO), tensor(1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0))  # 8 of 8 - 4: twice the centred ones
    rewards = tensor(1, 0, 0, 0, 1, 1, 0, 0)
    assert torch.equal(gpg(rewards, TWO), dr_grpo(rewards, TWO))  # every group has a signal: nothing to add
    # A sample at its group's mean is no sample without a signal; one that could not be scored is none at all.
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
    with respect to p's logit is that of -(sum over k from 1 to N - 1 of (1 - p)^k / k).
    """
    p, size = 0.3, 4
    expected = p * (1 - p) * sum((1 - p) ** (k - 1) for k in range(1, size))
    total = 0.0
    for right in range(size + 1):
        rewards = tensor(*[1.0] * right, *[0.0] * (size - right), dtype=torch.float64)
        scores = torch.where(rewards == 1, 1 - p, -p).double()  # d log pi / d logit
        own = maxrl(rewards, torch.zeros(size, dtype=torch.long)) * scores
        total += math.comb(size, right) * p**right * (1 - p) ** (size - right) * float(own.mean())
    assert total == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reward", [0.5, 2.0, -1.0])
def test_maxrl_refuses_rewards_that_are_not_right_or_wrong(reward):
    with pytest.raises(ValueError, match=f"reward {reward:g}: expected 0 or 1; use a single reward"):
        maxrl(tensor(1, 0, reward), torch.zeros(3, dtype=torch.long))


def test_grpo_passk_rewards_the_best_alone_by_its_lead():
    rewards = tensor(0.5, 3, 1, 1, 4, 4, 0, 0)
    lead = 3 - 1
    expected = [0, lead / statistics.stdev([0.5, 3, 1, 1]), 0, 0, 0, 0, 0, 0]  # two equal best have none
    close(grpo_passk(rewards, TWO, eps=0.0), tensor(*expected))
    close(grpo_passk(rewards, TWO, std="none"), tensor(0, 2, 0, 0, 0, 0, 0, 0))
    close(grpo_passk(tensor(1, NAN, INF, -2), TWO[:4], std="none"), tensor(3, 0, 0, 0))
    assert grpo_passk(tensor(7.0), torch.tensor([2])).tolist() == [0.0]
    with pytest.raises(ValueError, match="std = 'max': expected group, batch or none"):
        grpo_passk(rewards, TWO, std="max")


def test_grpo_passk_is_what_the_best_of_the_group_loses_without_a_sample():
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(12, generator=generator), torch.arange(12) // 4
    expected = []
    for i in range(12):
        own = [float(r) for r, g in zip(rewards.double(), groups, strict=True) if g == groups[i]]
        others = list(own)
        others.pop(i % 4)
        expected.append(max(own) - max(others))
    close(grpo_passk(rewards, groups, std="none"), tensor(*expected))


def test_two_samples_make_the_same_estimate_for_passk_and_leave_one_out_of_the_best():
    rewards, groups = tensor(0, 1), torch.tensor([0, 0])
    assert grpo_passk(rewards, groups, std="none")[1] == rloo(rewards, groups)[1] == 1.0
