"""The clipped policy loss and its gradient, case by case."""

import math

import pytest
import torch

from grpo_dist.algorithms.policy_losses import ppo_clip
from tests.support.numbers_by_hand import row


def clip_one(ratio, advantage, **bounds):
    """Return (loss, d loss / d logprob, stats) of a single token."""
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    losses, stats = ppo_clip(
        logprobs, torch.zeros_like(logprobs), row(advantage), torch.ones(1, 1, dtype=torch.bool), **bounds
    )
    losses.sum().backward()
    return losses.item(), float(logprobs.grad), {k: float(v) for k, v in stats.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.0, -2.0, 2.0, 2.0, None),
        (1.25, 2.0, -2.5, -2.5, None),  # inside 1.3
        (1.5, 2.0, -2.6, 0.0, "clip_high"),
        (0.5, 2.0, -1.0, -1.0, None),  # a token with A > 0 that became rare keeps its gradient
        (0.5, -2.0, 1.8, 0.0, "clip_low"),
        (0.95, -2.0, 1.9, 1.9, None),
        (5.0, -2.0, 10.0, 10.0, None),  # a token with A < 0 that became frequent keeps its gradient
    ],
)
def test_each_side_of_the_clip_has_its_own_bound(ratio, advantage, loss, gradient, clipped):
    actual, slope, stats = clip_one(ratio, advantage, clip_low=0.1, clip_high=0.3)
    assert (actual, slope) == (pytest.approx(loss), pytest.approx(gradient))
    assert (stats["clip_low"], stats["clip_high"]) == (clipped == "clip_low", clipped == "clip_high")
    assert stats["ratio"] == stats["ratio_max"] == pytest.approx(ratio)
    assert stats["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_dual_clip_caps_only_negative_advantages_and_only_if_set():
    assert clip_one(5.0, -2.0)[:2] == (pytest.approx(10.0), pytest.approx(10.0))
    loss, slope, stats = clip_one(5.0, -2.0, dual_clip=3.0)
    assert (loss, slope, stats["dual_clip"]) == (pytest.approx(6.0), 0.0, 1.0)
    assert clip_one(2.0, -2.0, dual_clip=3.0)[:2] == (pytest.approx(4.0), pytest.approx(4.0))
    assert clip_one(5.0, 2.0, dual_clip=3.0)[0] == pytest.approx(-2.4)


@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_that_would_overflow_gives_no_nan_where_the_loss_is_bounded(advantage, dtype):
    logprobs = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
    old, advantages = torch.full((1, 1), -2000.0, dtype=dtype), torch.full((1, 1), advantage, dtype=dtype)
    losses, _ = ppo_clip(logprobs, old, advantages, torch.ones(1, 1, dtype=torch.bool))
    losses.sum().backward()
    assert (losses.item(), float(logprobs.grad)) == (pytest.approx(-1.2 * advantage), 0.0)


def test_on_policy_the_gradient_is_the_policy_gradient_and_nothing_is_clipped():
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    losses, stats = ppo_clip(logprobs, logprobs.detach(), advantages, torch.ones(4, 6, dtype=torch.bool))
    losses.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)
    assert {k: float(v) for k, v in stats.items()} == {
        "ratio": 24.0, "ratio_max": 1.0, "clip_low": 0.0, "clip_high": 0.0, "dual_clip": 0.0, "approx_kl": 0.0
    }  # fmt: skip


def test_no_gradient_flows_into_old_logprobs():
    logprobs, old = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    ppo_clip(logprobs, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))[0].sum().backward()
    assert old.grad is None and logprobs.grad.tolist() == [[-1.0, -1.0]]
