"""DPPO with the KL bound, DRO, Kimi k1.5, TOPR, REINFORCE with weights of sequences, and VESPO: values and
gradients worked by hand, and those of their definitions in float64.
"""

import math

import pytest
import torch

from grpo_dist.algorithms.kl import binary_kl, total_variation
from grpo_dist.algorithms.policy_losses import (
    dppo_kl,
    dppo_tv,
    dro,
    kimi15,
    ppo_clip,
    reinforce_is,
    topr,
    topr_token,
    vespo,
)
from tests.support.numbers_by_hand import close, mask_of, one_row, row


def test_binary_divergences_have_the_values_of_the_table():
    old, new = row(0.001, 0.4, 0.99).log(), row(0.002, 0.8, 0.5).log()
    close(total_variation(old, new), row(0.001, 0.4, 0.49))
    expected = [p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
                for p, q in ((0.001, 0.002), (0.4, 0.8), (0.99, 0.5))]  # fmt: skip
    assert [round(v, 4) for v in expected] == [0.0003, 0.3819, 0.6371]
    close(binary_kl(old, new), row(*expected), 1e-9)
    assert not binary_kl(old, old).any()


def test_a_token_that_is_certain_has_a_finite_binary_kl():
    for dtype in (torch.float32, torch.float64):
        old, new = torch.tensor([[0.0, -1.0]], dtype=dtype), torch.tensor([[-1.0, 0.0]], dtype=dtype)
        got = binary_kl(old, new)
        assert got.isfinite().all() and float(got[0, 0]) == pytest.approx(1.0, abs=1e-6)
        q = math.exp(-1)
        assert float(got[0, 1]) == pytest.approx(-q + (1 - q) * math.log((1 - q) / 1e-8), rel=1e-5)


def test_dppo_kl_drops_tokens_that_moved_too_far_in_their_advantages_direction():
    """From 0.4 to 0.8 the divergence is 0.382, from 0.5 to 0.2 0.223, from 0.001 to 0.002 0.0003."""
    logprobs = [math.log(p) for p in (0.002, 0.8, 0.8, 0.2, 0.2)]
    ratios, advantages = [2.0, 2.0, 2.0, 0.4, 0.4], [1.0, 1.0, -1.0, -1.0, 1.0]
    for low, high, kept in ((0.2, 0.3, [1, 0, 1, 0, 1]), (0.23, 0.4, [1, 1, 1, 1, 1])):
        how = {"logprobs": logprobs, "clip_low": low, "clip_high": high}
        _, gradient, stats = one_row(dppo_kl, ratios, advantages, **how)
        expected = [-r * a * k for r, a, k in zip(ratios, advantages, kept, strict=True)]
        close(gradient, row(*expected), 1e-12)
        assert stats["clip_low"] == stats["clip_high"] == (5 - sum(kept)) / 2
    _, gradient, _ = one_row(dppo_kl, [50.0], [1.0], logprobs=[-9.0], ratio_cap=20)
    close(gradient, row(-20.0))


def test_the_two_bounds_of_dppo_keep_different_tokens():
    """From 1e-5 to 0.05 hardly any probability moves, but the KL of a binary choice is 0.051."""
    how = {"logprobs": [math.log(0.05)], "clip_high": 0.05, "ratio_cap": 1e4}
    for loss, ratio in ((dppo_tv, 5000.0), (dppo_kl, 5000.0)):
        _, gradient, _ = one_row(loss, [ratio], [1.0], **how)
        assert bool(gradient.any()) == (loss is dppo_tv)


def test_dro_adds_a_squared_log_ratio_for_each_token():
    ratios, advantages = [math.exp(0.5), math.exp(-1), 1.0], [2.0, -1.0, 1.0]
    losses, gradient, _ = one_row(dro, ratios, advantages, beta=0.4)
    close(losses, row(2 + 0.2 * 0.25, -1 + 0.2 * 1, 1), 1e-12)  # -A log p with log p = -1
    close(gradient, row(-2 + 0.4 * 0.5, 1 + 0.4 * -1, -1), 1e-12)


def test_kimi15_squares_the_log_ratio_of_the_whole_sequence():
    ratios, advantages = [math.exp(0.5), math.exp(-1), math.exp(0.2)], [2.0] * 3
    losses, gradient, _ = one_row(kimi15, ratios, advantages, tau=0.4)
    total = 0.5 - 1 + 0.2
    assert float(losses.sum()) == pytest.approx(3 * 2 + 0.2 * total**2, rel=1e-12)
    close(gradient, row(*[-2 + 0.4 * total] * 3), 1e-12)


def test_kimi15_has_value_and_gradient_of_its_definition():
    torch.manual_seed(0)
    mask = mask_of([4, 0, 3], 4)
    new = (torch.randn(3, 4, dtype=torch.float64) - 3).requires_grad_()
    old, advantages = new.detach() + 0.3 * torch.randn(3, 4), torch.randn(3, 1).expand(3, 4).double()
    losses, _ = kimi15(new, old, advantages, mask, tau=0.7)
    kept = torch.where(mask, new, 0.0)
    ratio = torch.where(mask, new - old, 0.0).sum(1)
    defined = (-(advantages[:, 0] * kept.sum(1)) + 0.35 * ratio**2).sum()
    close(losses.sum().detach(), defined.detach(), 1e-12)
    ours, theirs = (torch.autograd.grad(v, new, retain_graph=True)[0] for v in (losses.sum(), defined))
    close(ours, theirs, 1e-12)


@pytest.mark.parametrize(("loss", "weights"), [(topr_token, [1.0, 0.5, 0.8]), (topr, [1.0] * 3)])
def test_topr_tapers_bad_samples_by_their_ratio_and_good_ones_never(loss, weights):
    """The product of 2, 0.5 and 0.8 is 0.8 for a whole sequence."""
    ratios = [2.0, 0.5, 0.8]
    tapered = [0.8] * 3 if loss is topr else weights
    losses, gradient, stats = one_row(loss, ratios, [-2.0] * 3)
    close(gradient, row(*(2 * w for w in tapered)), 1e-12)
    close(losses, row(*(-2 * w for w in tapered)), 1e-12)
    assert stats["clip_high"] == (0 if loss is topr else 1)
    _, gradient, stats = one_row(loss, ratios, [3.0] * 3)
    close(gradient, row(-3, -3, -3))
    assert stats["clip_high"] == 0
    _, gradient, _ = one_row(loss, [2.0, 3.0], [-1.0] * 2)
    close(gradient, row(1, 1))


@pytest.mark.parametrize("advantage", [-2.0, 3.0])
def test_reinforce_weighs_a_sequence_by_its_ratio_up_to_the_cap(advantage):
    """The product of 2, 0.5 and 0.8 is 0.8, that of 2, 0.5 and 3 is 3; the sign of A changes nothing."""
    for ratios, how, weight in (
        ([2.0, 0.5, 0.8], {}, 0.8), ([2.0, 0.5, 3.0], {}, 2.0), ([2.0, 0.5, 3.0], {"ratio_cap": 2.5}, 2.5),
        ([2.0, 0.5, 0.8], {"ratio_cap": 0.5}, 0.5),
    ):  # fmt: skip
        losses, gradient, stats = one_row(reinforce_is, ratios, [advantage] * 3, **how)
        close(gradient, row(*[-weight * advantage] * 3), 1e-12)
        close(losses, row(*[weight * advantage] * 3), 1e-12)  # -w A log p with log p = -1
        assert stats["clip_high"] == (0 if how == {} and weight == 0.8 else 3) and stats["clip_low"] == 0


def test_vespo_weighs_sequences_by_a_gamma_function_of_their_ratio():
    ratios = [1.2, 0.5, 1.1]
    w = 1.2 * 0.5 * 1.1
    for advantage, k, decay in ((1.5, 2.0, 3.0), (-0.5, 3.0, 2.0)):
        phi = w**k * math.exp(decay * (1 - w))
        losses, gradient, _ = one_row(vespo, ratios, [advantage] * 3)
        close(gradient, row(*[-phi * advantage] * 3), 1e-12)
        close(losses, row(*[phi * advantage] * 3), 1e-12)
    _, gradient, _ = one_row(vespo, [2.0], [1.0], k_positive=1.0, lambda_positive=0.5)
    close(gradient, row(-2 * math.exp(-0.5)), 1e-12)


def test_vespo_forgets_sequences_far_from_the_policy_on_both_sides():
    for log_ratio in (-30.0, 5.0, 200.0):
        _, gradient, _ = one_row(vespo, [math.exp(log_ratio)], [1.0])
        assert float(gradient.abs()) < 1e-10


@pytest.mark.parametrize("delta", [1.2, 1.5, 4.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.1, 1.3, 3.0, 9.0])
def test_dual_clip_is_the_two_sided_clip_of_trl(delta, advantage, ratio):
    """INTELLECT-2 (arXiv:2505.07291): -min(min(r, delta) A, clip(r) A). Equal for a delta from 1 + clip_high
    on, which is where TRL recommends it: with A > 0 the upper clip is below delta already.
    """
    losses, gradient, _ = one_row(ppo_clip, [ratio], [advantage], dual_clip=delta)
    new = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    r = (new - new.detach()).exp() * ratio
    theirs = -torch.minimum(r.clamp(max=delta) * advantage, r.clamp(0.8, 1.2) * advantage)
    (expected,) = torch.autograd.grad(theirs, new)
    close(losses, theirs.detach().view(1, 1), 1e-12)
    close(gradient, expected.view(1, 1), 1e-12)
