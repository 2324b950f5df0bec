"""The formulas, against numbers worked by hand and against what must not matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from grpo_dist.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, rloo
from grpo_dist.algorithms.aggregation import MODES, aggregate
from grpo_dist.algorithms.kl import KL_ESTIMATORS, k1, k2, k3
from grpo_dist.algorithms.offpolicy import correction
from grpo_dist.algorithms.policy_losses import ppo_clip

NAN = math.nan
EIGHT = tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
ONE_GROUP = torch.zeros(8, dtype=torch.long)


# advantages


def test_golden_values_of_one_group():
    right, wrong = EIGHT == 1, EIGHT == 0
    for estimator, high, low in (
        (grpo, 1.6201816, -0.5400605), (rloo, 0.8571429, -0.2857143), (dr_grpo, 0.75, -0.25)
    ):  # fmt: skip
        advantages = estimator(EIGHT, ONE_GROUP)
        assert torch.allclose(advantages[right], tensor(high), atol=1e-6)
        assert torch.allclose(advantages[wrong], tensor(low), atol=1e-6)
    assert torch.equal(grpo(EIGHT, ONE_GROUP, std="none"), dr_grpo(EIGHT, ONE_GROUP))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.7, 0.1, 1e-8, 1e8, -0.3])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
def test_equal_rewards_give_exact_zeros(name, value, size):
    rewards = torch.full((size,), value, dtype=torch.float32)
    assert torch.equal(ADVANTAGES[name](rewards, torch.zeros(size, dtype=torch.long)), torch.zeros(size))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_single_scored_sample_gets_zero(name):
    advantages = ADVANTAGES[name](tensor([1.0, NAN, NAN, 0.5]), tensor([3, 3, 3, 9]))
    assert torch.equal(advantages, torch.zeros(4))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_unscored_samples_leave_the_statistics(name):
    with_nan = ADVANTAGES[name](tensor([1.0, NAN, 0.0, 0.0, NAN]), torch.zeros(5, dtype=torch.long))
    without = ADVANTAGES[name](tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long))
    assert torch.equal(with_nan[[0, 2, 3]], without)
    assert torch.equal(with_nan[[1, 4]], torch.zeros(2))


def test_batch_deviation_by_hand():
    """Centred (-1, 1, -2, 2): sum of squares 10 over 4 samples less 2 means = 5."""
    advantages = grpo(tensor([0.0, 2, 1, 5]), tensor([0, 0, 1, 1]), std="batch", eps=0.0)
    assert torch.allclose(advantages, tensor([-1.0, 1, -2, 2]) / math.sqrt(5))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_advantages_follow_samples_wherever_they_stand(data):
    size = data.draw(st.integers(2, 20))
    rewards = tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0, NAN]), min_size=size, max_size=size))
    )
    ids = tensor(data.draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size)))
    order = tensor(data.draw(st.permutations(range(size))))
    for name, estimator in ADVANTAGES.items():
        assert torch.allclose(
            estimator(rewards[order], ids[order]), estimator(rewards, ids)[order], atol=1e-6
        ), name


def test_arguments_are_not_written_into():
    rewards = tensor([1.0, NAN, 0.0])
    kept = rewards.clone()
    grpo(rewards, torch.zeros(3, dtype=torch.long))
    assert torch.equal(rewards, kept) or torch.equal(rewards.isnan(), kept.isnan())


# kl


def test_golden_values_of_the_estimators():
    d, zero = tensor([[0.5, -1.0, 0.0]]), torch.zeros(1, 3)
    assert torch.allclose(k1(d, zero), tensor([[0.5, -1.0, 0.0]]))
    assert torch.allclose(k2(d, zero), tensor([[0.125, 0.5, 0.0]]))
    assert torch.allclose(k3(d, zero), tensor([[0.1065307, 0.7182818, 0.0]]), atol=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_gradient_never_vanishes_where_divergence_is_large(name):
    logprobs = tensor([[-30.0, -15.0, -12.0]], requires_grad=True)
    KL_ESTIMATORS[name](logprobs, torch.zeros(1, 3)).sum().backward()
    assert (logprobs.grad.abs() >= 1.0).all() and logprobs.grad.isfinite().all()


def test_k3_is_exact_where_policies_hardly_differ():
    d = tensor([[1e-4]])
    assert float(k3(d, torch.zeros(1, 1))) == pytest.approx(0.5e-8, rel=1e-3)


# ppo clip


def loss_of(ratio, advantage, **kwargs):
    logprobs = tensor([[ratio]]).log()
    losses, stats = ppo_clip(
        logprobs, torch.zeros(1, 1), tensor([[advantage]]), torch.ones(1, 1, dtype=bool), **kwargs
    )
    return float(losses), stats


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "bound"),
    [
        (1.1, 2.0, -2.2, None),
        (1.5, 2.0, -2.56, "clip_high"),  # 1.28 * 2
        (0.5, 2.0, -1.0, None),
        (1.5, -2.0, 3.0, None),
        (0.5, -2.0, 1.6, "clip_low"),  # 0.8 * 2
    ],
)
def test_clip_by_hand(ratio, advantage, expected, bound):
    loss, stats = loss_of(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert {name for name in ("clip_low", "clip_high", "dual_clip") if stats[name]} == (
        {bound} if bound else set()
    )


def test_dual_clip_is_off_unless_asked_for():
    assert loss_of(10.0, -1.0)[0] == pytest.approx(10.0, rel=1e-5)
    loss, stats = loss_of(10.0, -1.0, dual_clip=3.0)
    assert loss == 3.0 and stats["dual_clip"] == 1


def test_at_ratio_one_the_gradient_is_minus_the_advantage():
    logprobs = torch.randn(2, 3, requires_grad=True)
    advantages = torch.randn(2, 3)
    losses, stats = ppo_clip(logprobs, logprobs.detach(), advantages, torch.ones(2, 3, dtype=torch.bool))
    losses.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)
    assert float(stats["ratio"]) == 6.0 and float(stats["approx_kl"]) == 0.0


def test_garbage_where_masked_reaches_neither_loss_nor_gradient():
    logprobs = tensor([[-1.0, NAN, math.inf, -math.inf]], requires_grad=True)
    mask = tensor([[True, False, False, False]])
    garbage = tensor([[-1.0, math.inf, NAN, 5.0]])
    losses, stats = ppo_clip(logprobs, garbage, tensor([[1.0, NAN, NAN, math.inf]]), mask)
    total = aggregate(losses, mask, "token-mean", num_tokens=1.0, num_sequences=1.0, max_tokens=4)
    total.backward()
    assert float(total.detach()) == -1.0
    assert torch.equal(logprobs.grad, tensor([[-1.0, 0, 0, 0]]))
    assert all(torch.isfinite(torch.as_tensor(v, dtype=torch.float64)) for v in stats.values())


# aggregation


LENGTHS = tensor([5, 3, 1, 4, 2, 5, 2, 3])
LOSSES = torch.arange(40.0).view(8, 5) / 10
MASK = torch.arange(5)[None] < LENGTHS[:, None]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.7960),
        ("seq-mean-token-mean", 1.85625),
        ("seq-mean-token-sum", 5.6125),
        ("seq-mean-token-sum-norm", 1.12250),
    ],
)
def test_golden_values_of_the_aggregations(mode, expected):
    value = aggregate(LOSSES, MASK, mode, num_tokens=25.0, num_sequences=8.0, max_tokens=5)
    assert float(value) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_parts_add_up_to_the_whole(mode, data):
    owner = tensor(data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8)))
    how = {"num_tokens": 25.0, "num_sequences": 8.0, "max_tokens": 5}
    parts = [aggregate(LOSSES[owner == i], MASK[owner == i], mode, **how) for i in range(4)]
    assert float(sum(parts)) == pytest.approx(float(aggregate(LOSSES, MASK, mode, **how)), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_unmasked_is_zero_with_zero_gradient(mode):
    losses = torch.full((2, 3), NAN, requires_grad=True)
    value = aggregate(
        losses, torch.zeros(2, 3, dtype=torch.bool), mode, num_tokens=0.0, num_sequences=0.0, max_tokens=3
    )
    value.backward()
    assert float(value.detach()) == 0.0 and torch.equal(losses.grad, torch.zeros(2, 3))


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'mean'.*token-mean, seq-mean-token-mean"):
        aggregate(LOSSES, MASK, "mean", num_tokens=1.0, num_sequences=1.0, max_tokens=1)


# correction


def weights_of(kind, level="token", low=0.5, high=2.0, ratios=((4.0, 1.0, 0.25),), mask=None):
    logs = tensor(ratios).log()
    mask = torch.ones_like(logs, dtype=torch.bool) if mask is None else mask
    return correction(logs, torch.zeros_like(logs), mask, kind=kind, level=level, low=low, high=high)


@pytest.mark.parametrize(
    ("kind", "level", "expected"),
    [
        ("tis", "token", [2.0, 1.0, 0.5]),
        ("mis", "token", [0.0, 1.0, 0.0]),
        ("icepop", "token", [0.0, 1.0, 0.0]),
        ("tis", "sequence", [1.0, 1.0, 1.0]),  # the product is 1
        ("icepop", "sequence", [4.0, 1.0, 0.25]),  # let through; the token's own ratio
    ],
)
def test_weights_by_hand(kind, level, expected):
    assert torch.allclose(weights_of(kind, level)[0], tensor([expected]))


def test_geometric_level_is_the_mean_per_token():
    weights, _ = weights_of("tis", "geometric", ratios=((2.0, 2.0, 0.5),), high=10.0)
    assert torch.allclose(weights, torch.full((1, 3), 2 ** (1 / 3)))


def test_truncation_keeps_small_ratios_unless_a_lower_bound_is_set():
    assert torch.allclose(weights_of("tis", low=0.0)[0], tensor([[2.0, 1.0, 0.25]]))


def test_weights_carry_no_gradient_and_are_zero_where_masked():
    train = torch.zeros(1, 2, requires_grad=True)
    weights, stats = correction(
        train, tensor([[0.0, NAN]]), tensor([[True, False]]), kind="tis", level="token", low=0.0, high=2.0
    )
    assert not weights.requires_grad
    assert torch.equal(weights, tensor([[1.0, 0.0]]))
    assert float(stats["weight"]) == 1.0 and float(stats["outside"]) == 0.0


def test_a_ratio_beyond_all_bounds_is_not_infinite():
    weights, stats = weights_of("tis", ratios=((1e30, 1.0, 1.0),), high=1e9)
    assert torch.isfinite(weights).all() and math.isfinite(float(stats["weight"]))
