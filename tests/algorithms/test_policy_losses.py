"""Policy losses: values and gradients worked by hand, and invariants of all of them."""

import math

import pytest
import torch

from grpo_dist.algorithms.aggregation import MODES, aggregate
from grpo_dist.algorithms.policy_losses import (
    POLICY_LOSSES,
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    dro,
    gmpo,
    gspo,
    gspo_segment,
    kimi15,
    kl_cov,
    policy_gradient,
    ppo_clip,
    reinforce_is,
    sapo,
    topr,
    topr_token,
    vespo,
)
from tests.support.numbers_by_hand import close, mask_of, one_row, row


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


def test_no_gradient_flows_into_old_logprobs():
    logprobs, old = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    ppo_clip(logprobs, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))[0].sum().backward()
    assert old.grad is None and logprobs.grad.tolist() == [[-1.0, -1.0]]


# Probabilities of five tokens after a move: the binary KL from 0.4 to 0.8 is 0.382, from 0.5 to 0.2 0.223,
# from 0.001 to 0.002 0.0003.
PROBABILITIES = {"logprobs": [math.log(p) for p in (0.002, 0.8, 0.8, 0.2, 0.2)]}
MOVED = ([2.0, 2.0, 2.0, 0.4, 0.4], [1.0, 1.0, -1.0, -1.0, 1.0])
MEAN, GATE = (1.1 * 0.95) ** (1 / 3), 1 / (1 + math.exp(-3.0))  # gspo, sapo
LOGS = [math.exp(d) for d in (0.1, 0.9, -0.9)]
KEPT, CUT = math.exp((0.1 + 0.4 - 0.9) / 3), math.exp((0.1 + 0.9 - 0.4) / 3)  # gmpo's means, clipped at 0.4
HALF = [math.exp(0.5), math.exp(-1), 1.0]
TOTAL = 0.5 - 1 + 0.2
SELECTED = {"selected": torch.tensor([[True, False, False, True]])}
COVARIANCE = ([1.1, 1.1, 3.0, 0.5], [2.0, 2.0, 2.0, -1.0])
PRODUCT = 1.2 * 0.5 * 1.1


def phi(w, k, decay):
    return w**k * math.exp(decay * (1 - w))


@pytest.mark.parametrize(
    ("loss", "ratios", "advantages", "settings", "losses", "gradient", "clipped"),
    [
        (policy_gradient, [1, 3], [2, -1], {}, (-2, 1), (-2, 1), (0, 0)),
        # - weight * A * log-prob, which is -1
        (cispo, [0.1, 1.5, 4, 4], [1, 1, 1, -2], {"clip_low": 0.5, "clip_high": 1.0},
         (0.5, 1.5, 2, -4), (-0.5, -1.5, -2, 4), (1, 2)),
        (cispo, [0.1, 0.1, 4, 4, 1.5], [1, -1, 1, -2, 1],
         {"clip_low": 0.5, "clip_high": 1.0, "unified_mask": True},
         (0.5, 0, 0, -4, 1.5), (-0.5, 0, 0, 4, -1.5), (1, 1)),  # drops the same tokens as ppo_clip
        # 4 / tau * sigmoid(0), and PPO's gradient on-policy
        (sapo, [1, 1], [1, -1], {"tau_positive": 1.0, "tau_negative": 2.0}, (-2, 1), (-1, 1), (0, 0)),
        (sapo, [3], [1], {"tau_positive": 1.5}, (-GATE * 4 / 1.5,), (-4 * GATE * (1 - GATE) * 3,), (0, 0)),
        (dppo_tv, *MOVED, PROBABILITIES | {"clip_low": 0.2, "clip_high": 0.3},
         None, (-2, 0, 2, 0, -0.4), (1, 1)),
        (dppo_tv, [50], [1], {"logprobs": [-9.0], "ratio_cap": 20}, None, (-20,), (0, 0)),
        (dppo_kl, *MOVED, PROBABILITIES | {"clip_low": 0.2, "clip_high": 0.3},
         None, (-2, 0, 2, 0, -0.4), (1, 1)),
        (dppo_kl, *MOVED, PROBABILITIES | {"clip_low": 0.23, "clip_high": 0.4},
         None, (-2, -2, 2, 0.4, -0.4), (0, 0)),
        (dppo_kl, [50], [1], {"logprobs": [-9.0], "ratio_cap": 20}, None, (-20,), (0, 0)),
        (gspo, [1.1, 0.95, 1], [2] * 3, {"clip_low": 0.1, "clip_high": 0.1},
         (-2 * MEAN,) * 3, (-2 * MEAN,) * 3, (0, 0)),
        (gspo, [1.1, 0.95, 1], [2] * 3, {"clip_low": 1e-3, "clip_high": 1e-3},
         (-2 * 1.001,) * 3, (0, 0, 0), (0, 3)),
        # three tokens carry the mean, each a third of its gradient
        (gmpo, LOGS, [2] * 3, {}, (-2 * KEPT,) * 3, (-2 * KEPT, 0, -2 * KEPT), (0, 1)),
        (gmpo, LOGS, [-1] * 3, {}, (CUT,) * 3, (CUT, CUT, 0), (1, 0)),
        (dro, HALF, [2, -1, 1], {"beta": 0.4},
         (2 + 0.2 * 0.25, -1 + 0.2 * 1, 1), (-2 + 0.4 * 0.5, 1 + 0.4 * -1, -1), (0, 0)),
        (kimi15, [math.exp(d) for d in (0.5, -1, 0.2)], [2] * 3, {"tau": 0.4},
         tuple(2 + 0.2 * TOTAL * d for d in (0.5, -1, 0.2)), (-2 + 0.4 * TOTAL,) * 3, (0, 0)),
        # the product of 2, 0.5 and 0.8 is 0.8
        (topr, [2, 0.5, 0.8], [-2] * 3, {}, (-1.6,) * 3, (1.6,) * 3, (0, 0)),
        (topr, [2, 0.5, 0.8], [3] * 3, {}, (3,) * 3, (-3,) * 3, (0, 0)),
        (topr, [2, 3], [-1] * 2, {}, (-1,) * 2, (1,) * 2, (0, 2)),
        (topr_token, [2, 0.5, 0.8], [-2] * 3, {}, (-2, -1, -1.6), (2, 1, 1.6), (0, 1)),
        (topr_token, [2, 0.5, 0.8], [3] * 3, {}, (3,) * 3, (-3,) * 3, (0, 0)),
        (topr_token, [2, 3], [-1] * 2, {}, (-1,) * 2, (1,) * 2, (0, 2)),
        *(
            (reinforce_is, ratios, [a] * 3, settings, (w * a,) * 3, (-w * a,) * 3, (0, 0 if is_free else 3))
            for a in (-2, 3)  # the sign changes nothing
            for ratios, settings, w, is_free in (
                ([2, 0.5, 0.8], {}, 0.8, True),
                ([2, 0.5, 3], {}, 2, False),
                ([2, 0.5, 3], {"ratio_cap": 2.5}, 2.5, False),
                ([2, 0.5, 0.8], {"ratio_cap": 0.5}, 0.5, False),
            )
        ),
        *(
            (vespo, [1.2, 0.5, 1.1], [a] * 3, {}, (phi(PRODUCT, k, decay) * a,) * 3,
             (-phi(PRODUCT, k, decay) * a,) * 3, (0, 0))
            for a, k, decay in ((1.5, 2, 3), (-0.5, 3, 2))
        ),
        (vespo, [2], [1], {"k_positive": 1.0, "lambda_positive": 0.5}, None, (-2 * math.exp(-0.5),), (0, 0)),
        (clip_cov, *COVARIANCE, SELECTED, (0, -2.2, -2.4, 0), (0, -2.2, 0, 0), None),  # clips the others
        (kl_cov, *COVARIANCE, SELECTED | {"cov_kl_coef": 0.5},
         (-2.2 + 0.5 * math.log(1.1), -2.2, -6, 0.5 + 0.5 * math.log(2)),
         (-2.2 + 0.5, -2.2, -6, 0.5 - 0.5), None),  # clips nothing
    ],
)  # fmt: skip
def test_losses_and_gradients_are_those_worked_by_hand(
    loss, ratios, advantages, settings, losses, gradient, clipped
):
    """Log-probs are -1. ``clipped``: tokens clipped at the lower and at the upper bound."""
    values, slopes, stats = one_row(loss, ratios, advantages, **settings)
    if losses is not None:
        close(values, row(*losses), 1e-12)
    close(slopes, row(*gradient), 1e-12)
    if clipped is not None:
        assert (stats["clip_low"], stats["clip_high"]) == clipped
    assert stats.get("selected", 2) == 2 and stats["ratio_max"] == pytest.approx(max(ratios))


def test_vespo_forgets_sequences_far_from_the_policy_on_both_sides():
    for log_ratio in (-30.0, 5.0, 200.0):
        _, gradient, _ = one_row(vespo, [math.exp(log_ratio)], [1.0])
        assert float(gradient.abs()) < 1e-10


def test_the_two_bounds_of_dppo_keep_different_tokens():
    """From 1e-5 to 0.05 little probability moves, but the binary KL is 0.051."""
    how = {"logprobs": [math.log(0.05)], "clip_high": 0.05, "ratio_cap": 1e4}
    for loss, ratio in ((dppo_tv, 5000.0), (dppo_kl, 5000.0)):
        _, gradient, _ = one_row(loss, [ratio], [1.0], **how)
        assert bool(gradient.any()) == (loss is dppo_tv)


def test_gspo_is_the_sequence_form_under_every_aggregation():
    torch.manual_seed(0)
    mask = mask_of([4, 2, 3], 4)
    new = (torch.randn(3, 4, dtype=torch.float64) - 3).requires_grad_()
    old = new.detach() + 0.1 * torch.randn(3, 4, dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64).expand(3, 4)
    how = {"num_tokens": 9.0, "num_sequences": 3.0, "max_tokens": 4}
    for mode in MODES:
        losses, _ = gspo(new, old, advantages, mask, clip_low=0.5, clip_high=0.5)
        (ours,) = torch.autograd.grad(aggregate(losses, mask, mode, **how), new)
        mean = (torch.where(mask, new - old, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp()
        (theirs,) = torch.autograd.grad(aggregate(-mean * advantages, mask, mode, **how), new)
        close(ours, theirs, 1e-12)


def test_gspo_segment_takes_the_geometric_mean_of_each_action():
    """Two actions around a tool token: ratios 1.1, 0.95 and 1.2, 1.4. Each token keeps its advantage."""
    new = row(-1.0, -1.0, math.nan, -1.0, -1.0).requires_grad_()
    mask = torch.tensor([[True, True, False, True, True]])
    old = new.detach() - torch.log(row(1.1, 0.95, 7.0, 1.2, 1.4))
    losses, stats = gspo_segment(new, old, row(2.0, -1.0, 5.0, 1.0, -1.0), mask)
    first, second = math.sqrt(1.1 * 0.95), math.sqrt(1.2 * 1.4)
    close(losses.detach(), row(-2 * first, first, 0.0, -1.2, second), 1e-12)  # the second is above 1.2
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    close(gradient, row(-2 * first, first, 0.0, 0.0, second), 1e-12)
    assert stats["clip_high"] == 1 and stats["clip_low"] == 0


def test_gmpo_is_the_mean_of_the_kept_tokens_alone():
    """The second token is removed: two tokens are left, and each has half of the gradient of each term."""
    new = row(0.1, 0.9, -0.3).requires_grad_()
    mask, kept = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[True, False, True]])
    losses, _ = gmpo(new, torch.zeros_like(new), row(2.0, 2.0, 2.0), mask, kept)
    s = math.exp((0.1 - 0.3) / 2)
    close(losses[kept].detach(), row(-2 * s, -2 * s)[0], 1e-12)
    (gradient,) = torch.autograd.grad(losses[kept].sum(), new)
    close(gradient, row(-2 * s, 0.0, -2 * s), 1e-12)
    nothing, _ = gmpo(new, torch.zeros_like(new), row(2.0, 2.0, 2.0), mask, ~mask)
    assert nothing.tolist() == [[-2.0] * 3]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("advantage", [1.5, -0.5, 0.0])
def test_on_policy_every_loss_has_the_policy_gradient(name, advantage):
    """Gradients are summed over a sequence, because sequence losses spread them over their tokens."""
    _, gradient, stats = one_row(POLICY_LOSSES[name], [1.0] * 4, [advantage] * 4)
    close(gradient, row(*[-advantage] * 4), 1e-12)
    assert stats["ratio"] == 4 and stats["clip_low"] == stats["clip_high"] == 0


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("log_ratio", [20.0, -20.0])
def test_extreme_ratios_give_finite_losses_and_gradients(name, dtype, log_ratio):
    new = torch.full((2, 3), -25.0, dtype=dtype, requires_grad=True)
    old = new.detach() - log_ratio
    advantages = torch.tensor([[1.0], [-1.0]], dtype=torch.float32).expand(2, 3)
    losses, stats = POLICY_LOSSES[name](new, old, advantages, torch.ones(2, 3, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert losses.isfinite().all() and gradient.isfinite().all()
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_where_masked_reaches_no_loss(name, garbage):
    torch.manual_seed(1)
    mask = mask_of([3, 0, 4], 4)
    inputs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
    results = []
    for fill in (0.0, garbage):
        new, old, advantages = (torch.where(mask, t, fill) for t in inputs)
        new.requires_grad_()
        losses, stats = POLICY_LOSSES[name](new, old, advantages, mask)
        (gradient,) = torch.autograd.grad(losses.sum(), new)
        assert not losses.detach()[~mask].any() and not gradient[~mask].any()
        results.append([losses.detach(), gradient, *stats.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gspo_segment", "gmpo"])
def test_a_negative_advantage_keeps_its_gradient_at_the_largest_ratio(name):
    """A ratio with A < 0 is unbounded: it stays exact at 70 nats, beyond the cut of bounded tokens."""
    new = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    losses, _ = POLICY_LOSSES[name](new, torch.full((1, 2), -70.0), torch.full((1, 2), -1.0), mask)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert losses.tolist() == [[pytest.approx(math.exp(70))] * 2]
    assert gradient.tolist() == [[pytest.approx(math.exp(70))] * 2]


@pytest.mark.parametrize("name", ["gspo", "gspo_segment", "gmpo"])
def test_an_overflowing_sequence_ratio_gives_no_nan_for_a_zero_advantage(name):
    new = torch.zeros(2, 2, requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    losses, _ = POLICY_LOSSES[name](new, torch.full((2, 2), -200.0), torch.zeros(2, 2), mask)
    (gradient,) = torch.autograd.grad(losses.sum(), new)
    assert not losses.any() and not gradient.any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logprobs_are_clipped_at_their_exact_values(name, dtype):
    """Bounds of 3e-4 are finer than bfloat16: differences and means must not be rounded to it."""
    generator = torch.Generator().manual_seed(2)
    old = -8 * torch.rand(64, 32, generator=generator)
    new = (old + 2e-3 * torch.randn(64, 32, generator=generator)).to(dtype)
    advantages = torch.randn(64, 1, generator=generator).expand(64, 32)
    mask = torch.ones(64, 32, dtype=torch.bool)
    _, exact = POLICY_LOSSES[name](new.double(), old.to(dtype).double(), advantages, mask)
    losses, stats = POLICY_LOSSES[name](new, old.to(dtype), advantages, mask)
    assert losses.dtype == torch.float32
    for key in ("clip_low", "clip_high"):
        assert float(stats[key]) == float(exact[key])
