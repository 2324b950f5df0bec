"""Importance corrections for samplers whose log-probs differ from the policy's, and rules that drop tokens:
numbers worked by hand.
"""

import math

import pytest
import torch

from grpo_dist.algorithms.offpolicy import (
    RULES,
    RejectionRule,
    accepted,
    correction,
    mean_weight_sums,
    off_policy_sequence_mask,
)
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.algorithms.ratios import segment_mean
from grpo_dist.policy.loss import batch_loss
from tests.support.losses import change, objective, train_batch
from tests.support.numbers_by_hand import INF, NAN, close, mask_of, row
from tests.support.tiers import one_each

KINDS, LEVELS = ("tis", "mis", "icepop"), ("token", "sequence", "geometric", "segment")
RATIOS = row(0.25, 1.0, 1.5, 4.0, 7.0)  # the last is masked
UNMASKED = torch.tensor([[True, True, True, True, False]])


def weights_of(kind, level, low, high):
    zeros = torch.zeros_like(RATIOS)
    return correction(RATIOS.log(), zeros, UNMASKED, kind=kind, level=level, low=low, high=high)


@pytest.mark.parametrize(
    ("kind", "level", "low", "high", "expected", "outside"),
    [
        ("tis", "token", 0.0, 2.0, [0.25, 1.0, 1.5, 2.0, 0.0], 1),
        ("tis", "token", 0.5, 2.0, [0.5, 1.0, 1.5, 2.0, 0.0], 2),
        ("mis", "token", 0.5, 2.0, [0.0, 1.0, 1.5, 0.0, 0.0], 2),
        ("icepop", "token", 0.5, 5.0, [0.0, 1.0, 1.5, 4.0, 0.0], 1),
        # The product is 1.5, the geometric mean 1.5 ** 0.25 = 1.1067.
        ("tis", "sequence", 0, 2, [1.5, 1.5, 1.5, 1.5, 0.0], 0),
        ("tis", "sequence", 0, 1.2, [1.2, 1.2, 1.2, 1.2, 0.0], 4),
        ("mis", "sequence", 0, 1.2, [0.0, 0.0, 0.0, 0.0, 0.0], 4),
        ("mis", "geometric", 0, 1.2, [1.1066819, 1.1066819, 1.1066819, 1.1066819, 0.0], 0),
        ("icepop", "geometric", 0, 1.2, [0.25, 1.0, 1.5, 4.0, 0.0], 0),
        ("icepop", "geometric", 0, 1.1, [0.0, 0.0, 0.0, 0.0, 0.0], 4),
    ],
)
def test_corrections_bound_or_mask_by_token_or_sequence(kind, level, low, high, expected, outside):
    weights, stats = weights_of(kind, level, low, high)
    close(weights, [expected])
    assert int(stats["outside"]) == outside
    by_level = {"token": RATIOS[UNMASKED], "sequence": row(*[1.5] * 4), "geometric": row(*[1.5**0.25] * 4)}
    unbounded = by_level[level]
    assert float(stats["weight"]) == pytest.approx(float(unbounded.sum()))
    assert float(stats["weight_max"]) == pytest.approx(float(unbounded.max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_logprobs_have_weight_one_and_weights_carry_no_gradient(kind, level):
    logprobs = (-torch.rand(2, 6)).requires_grad_()
    mask = mask_of([4, 6], 6)
    rollout = logprobs.detach().clone()
    weights, _ = correction(logprobs, rollout, mask, kind=kind, level=level, low=0.5, high=2)
    assert torch.equal(weights, mask.float()) and not weights.requires_grad
    assert weights.dtype == torch.float32


def test_extreme_ratios_stay_finite():
    logprobs = torch.tensor([[0.0, -1e4, 0.0]])
    rollout = torch.tensor([[-1e4, 0.0, -INF]])
    mask = torch.tensor([[True, True, True]])
    weights, _ = correction(logprobs, rollout, mask, kind="tis", level="token", low=0.1, high=2.0)
    close(weights, [[2.0, 0.1, 2.0]])


def test_one_vetoed_token_drops_its_sequence_and_no_other():
    train = torch.log(row(1.0, 0.05, 1.0).repeat(2, 1))
    train[1, 1] = 0.0
    mask = torch.ones(2, 3, dtype=torch.bool)
    how = {"kind": "tis", "level": "token", "low": 0.0, "high": 2.0}
    weights, stats = correction(train, torch.zeros_like(train), mask, **how, veto=0.1)
    close(weights, torch.tensor([[0.0, 0, 0], [1, 1, 1]]))
    assert float(stats["dropped"]) == 3
    weights, _ = correction(train, torch.zeros_like(train), mask, **how, veto=0.01)
    close(weights, train.exp())
    mask[0, 1] = False  # a masked token cannot veto
    weights, stats = correction(train, torch.zeros_like(train), mask, **how, veto=0.1)
    close(weights, torch.tensor([[1.0, 0, 1], [1, 1, 1]]))
    assert float(stats["weight_sq"]) == 5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [30.0, 80.0])
def test_old_logprobs_far_below_both_others_leave_loss_and_gradient_exact(gap, level):
    """Weight exp(-gap) times ratio exp(gap): the product matters, and is 1."""
    logprobs = torch.zeros(1, 1, requires_grad=True)
    old, rollout = torch.full((1, 1), -gap), torch.zeros(1, 1)
    batch = one_token_batch(old, rollout)
    settings = objective(correction={"kind": "tis", "level": level})
    loss, _ = batch_loss(logprobs, batch, settings)
    loss.backward()
    exact = math.exp(gap) * math.exp(-gap)
    assert [loss.item(), logprobs.grad.item()] == [pytest.approx(exact, rel=1e-5)] * 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gap", [95.0, 104.0, 150.0])
def test_a_product_that_overflows_is_not_finite_and_never_0(gap, level):
    """The ratio overflows float32. An underflowing weight does not count as a dropped token."""
    logprobs = torch.zeros(1, 1, requires_grad=True)
    batch = one_token_batch(torch.full((1, 1), -gap), torch.zeros(1, 1))
    loss, stats = batch_loss(logprobs, batch, objective(correction={"kind": "tis", "level": level}))
    assert not math.isfinite(loss.item()) and stats["correction_dropped"] == 0


def one_token_batch(old, rollout):
    mask, advantages = torch.ones_like(old, dtype=torch.bool), torch.full_like(old, -1.0)
    return train_batch(mask, advantages=advantages, rollout_logprobs=rollout, old_logprobs=old)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_ratio", [-80.0, -30.0, -1e-3, 0.0, 30.0, 80.0])
def test_weights_equal_their_definition_in_float64(kind, level, log_ratio):
    train, mask = torch.tensor([[log_ratio, 0.5]]), torch.ones(1, 2, dtype=torch.bool)
    low, high = 1e-20, 1e20
    logs = [float(v) for v in train[0].double()]
    mean = [sum(logs) / 2] * 2  # the sequence is one segment
    log_weights = {"token": logs, "sequence": [sum(logs)] * 2, "geometric": mean, "segment": mean}[level]
    expected = []
    for w, token in zip(map(math.exp, log_weights), map(math.exp, logs), strict=True):
        inside = low <= w <= high
        bounded = {"tis": min(max(w, low), high), "mis": w * inside, "icepop": token * inside}
        expected.append(bounded[kind])
    weights, _ = correction(train, torch.zeros(1, 2), mask, kind=kind, level=level, low=low, high=high)
    expected = torch.tensor([expected], dtype=torch.float64)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=0)


def test_bounds_and_vetoes_below_2e_9_take_effect():
    train = torch.tensor([[-25.0, 0.0], [-22.0, 0.0]])  # 1.4e-11, 2.8e-10
    mask = torch.ones(2, 2, dtype=torch.bool)
    how = {"kind": "mis", "level": "token", "high": 2.0}
    weights, _ = correction(train, torch.zeros(2, 2), mask, low=1e-10, **how)
    assert (weights[0, 0], weights[0, 1]) == (0.0, 1.0) and weights[1, 0] > 0
    weights, stats = correction(train, torch.zeros(2, 2), mask, low=0.0, veto=1e-10, **how)
    assert weights[0].tolist() == [0.0, 0.0] and weights[1].min() > 0 and float(stats["dropped"]) == 2


def test_an_infinite_ratio_of_a_dropped_sequence_affects_no_other():
    """The vetoed sequence has a ratio that overflows float32; the other one is normal."""
    logprobs = torch.zeros(2, 1, requires_grad=True)
    old, rollout = torch.tensor([[-200.0], [0.0]]), torch.zeros(2, 1)
    for name in ("ppo_clip", "gspo", "gmpo"):
        settings = objective(loss=name, correction={"kind": "tis", "veto": 1e-6})
        loss, _ = batch_loss(logprobs, one_token_batch(old, rollout), settings)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert loss.item() == 0.5 and gradient.tolist() == [[0.0], [0.5]], name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_of_the_engine_drops_its_sequence_under_every_correction(kind, level):
    rollout = torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, math.nan]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    how = {"kind": kind, "level": level, "low": 0.5, "high": 2.0}
    weights, stats = correction(torch.zeros(2, 3), rollout, mask, **how)
    assert weights.tolist() == [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    assert (float(stats["dropped"]), float(stats["outside"]), float(stats["weight"])) == (3, 3, 2)


@pytest.mark.parametrize("kind", ["none", "bypass", *KINDS])
def test_a_nan_of_the_engine_has_the_same_loss_with_and_without_correction(kind):
    logprobs, rollout = torch.zeros(2, 2, requires_grad=True), torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    batch = one_token_batch(rollout if kind == "bypass" else torch.zeros(2, 2), rollout)
    loss, stats = batch_loss(logprobs, batch, objective(correction=kind))
    loss.backward()
    assert loss.item() == 0.5 and logprobs.grad.tolist() == [[0.0, 0.0], [0.25, 0.25]]
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize(("name", "kind"), one_each(POLICY_LOSSES, ["none", *KINDS]))
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_losses_and_gradients_in_float32_are_those_of_float64(name, kind, advantage):
    """Old log-probs lie up to 80 nats below and above the other two."""
    gaps = torch.tensor([[0.0], [1e-3], [5.0], [-5.0], [30.0], [-30.0], [59.0], [61.0], [80.0], [-80.0]])
    results = []
    for dtype in (torch.float32, torch.float64):
        logprobs = torch.full(gaps.shape, -2.0, dtype=dtype, requires_grad=True)
        batch = one_token_batch(logprobs.detach() - gaps.to(dtype), logprobs.detach() + 0.25)
        advantages = torch.full_like(batch.policy.advantages, advantage)
        batch = change(batch, policy={"advantages": advantages})
        settings = objective(loss=name, correction=kind, aggregation="seq-mean-token-sum")
        for i in range(len(gaps)):  # one at a time: a sum would only test the largest
            loss, _ = batch_loss(logprobs[i : i + 1], batch.select([i]), settings)
            (gradient,) = torch.autograd.grad(loss, logprobs)
            results.append((float(loss.detach()), float(gradient[i])))
    single, exact = torch.tensor(results, dtype=torch.float64).chunk(2)
    torch.testing.assert_close(single, exact, rtol=2e-4, atol=1e-30)


# Log-ratios trainer - engine; in the third row only the first token is unmasked.
D = torch.tensor([[0.5, -1.0, 0.0], [0.1, 0.1, -0.1], [2.0, 9.0, 9.0]], dtype=torch.float64)
MASK = mask_of([3, 3, 1], 3)
ROLLOUT = torch.full_like(D, -3.0)


def kept(rule, high=None, low=None, **how):
    return accepted(ROLLOUT + D, ROLLOUT, MASK, [RejectionRule(rule, high, low)], **how).int().tolist()


ALL, NONE = [1, 1, 1], [0, 0, 0]


@pytest.mark.parametrize(
    ("rule", "high", "low", "expected"),
    [
        ("token_k1", math.exp(0.5), None, [ALL, ALL, NONE]),
        ("token_k1", None, 0.5, [[1, 0, 1], ALL, [1, 0, 0]]),  # exp(-1) is 0.37
        ("token_k2", 0.2, None, [[1, 0, 1], ALL, NONE]),  # 0.125, 0.5, 0; 2
        ("token_k3", 0.3, None, [[1, 0, 1], ALL, NONE]),  # 0.1487, 0.3679, 0; 4.39
        ("seq_sum_k1", 1.2, 0.7, [NONE, ALL, NONE]),  # products 0.607, 1.105, 7.39
        ("seq_mean_k1", 1.2, 0.8, [ALL, ALL, NONE]),  # geometric means 0.846, 1.034, 7.39
        ("seq_mean_k2", 0.21, None, [ALL, ALL, NONE]),  # 0.2083, 0.005, 2
        ("seq_sum_k2", 0.6, None, [NONE, ALL, NONE]),  # 0.625, 0.015, 2
        ("seq_max_k2", 0.5, None, [ALL, ALL, NONE]),
        ("seq_max_k3", 0.36, None, [NONE, ALL, NONE]),
        ("seq_mean_k3", 0.18, None, [ALL, ALL, NONE]),  # 0.1722
        ("token_tv", 0.03, None, [[0, 0, 1], ALL, NONE]),  # e^-3 is 0.0498: 0.0323, 0.0315, 0; 0.318
    ],
)
def test_each_rule_keeps_tokens_within_its_bounds(rule, high, low, expected):
    assert kept(rule, high, low) == (torch.tensor(expected) * MASK).tolist()


def test_the_gate_of_binary_kl_is_that_of_the_engine_to_the_trainer():
    p, q = math.exp(-3.0), math.exp(-2.5)
    exact = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert kept("token_binary_kl", exact * 1.0001)[0][0] == 1
    assert kept("token_binary_kl", exact * 0.9999)[0][0] == 0


def test_rules_combine_and_a_veto_drops_the_sequence():
    rules = [RejectionRule("token_k1", 1.2, 0.3), RejectionRule("seq_max_k2", 1.0)]
    both = accepted(ROLLOUT + D, ROLLOUT, MASK, rules)
    assert both.int().tolist() == [[0, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert accepted(ROLLOUT + D, ROLLOUT, MASK, [], veto=0.4).int().tolist() == [NONE, ALL, [1, 0, 0]]
    assert torch.equal(accepted(ROLLOUT + D, ROLLOUT, MASK, []), MASK)


def test_masked_and_non_finite_tokens_decide_only_for_themselves():
    train, rollout = ROLLOUT + D, ROLLOUT.clone()
    train[2, 1:], rollout[0, 0] = NAN, NAN
    for rule in RULES:
        got = accepted(train, rollout, MASK, [RejectionRule(rule, 1e9)]).int().tolist()
        assert got[1] == ALL and got[2] == [1, 0, 0] and got[0][0] == 0, rule
        assert got[0][1:] == ([1, 1] if rule.startswith("token") else [0, 0]), rule


def test_the_off_policy_mask_drops_bad_tokens_of_sequences_that_the_policy_has_left():
    """Mean of log p of the sampler minus the policy's: 1/6, -0.033 and -2."""
    advantages = torch.tensor([[-1.0, -1.0, 1.0], [-1.0, -1.0, -1.0], [-1.0, NAN, NAN]])
    for threshold, first in ((0.1, [0, 0, 1]), (0.2, [1, 1, 1])):
        got = off_policy_sequence_mask(ROLLOUT + D, ROLLOUT, advantages, MASK, threshold=threshold)
        assert got.int().tolist() == [first, ALL, [1, 0, 0]]


def test_segments_are_runs_of_sampled_tokens():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0, 0, 1]], dtype=torch.bool)
    values = torch.tensor([[9.0, 1, 3, 9, 2, 4, 6, 9], [5.0, 7, 9, 2, 9, 9, 9, 8]])
    expected = torch.tensor([[0.0, 2, 2, 0, 4, 4, 4, 0], [6.0, 6, 0, 2, 0, 0, 0, 8]])
    assert torch.equal(segment_mean(values, mask), expected)
    zeros = torch.zeros_like(values)
    weights, _ = correction(values, zeros, mask, kind="tis", level="segment", low=0, high=99)
    close(weights, torch.where(mask, expected.exp().clamp(max=99), 0.0), 1e-6)


@pytest.mark.parametrize(("level", "mean"), [("token", (1 + 2 + 2 + 4) / 4), ("sequence", (5 / 3 + 4) / 2)])
def test_the_mean_weight_is_over_tokens_or_over_sequences_and_adds_up_over_any_split(level, mean):
    weights = torch.tensor([[1.0, 2, 2], [4.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = mask_of([3, 1, 0], 3)
    total, count = mean_weight_sums(weights, mask, level=level)
    assert total / count == pytest.approx(mean, rel=1e-12)
    parts = [mean_weight_sums(weights[i : i + 1], mask[i : i + 1], level=level) for i in range(3)]
    assert (sum(t for t, _ in parts), sum(c for _, c in parts)) == (pytest.approx(total), count)
