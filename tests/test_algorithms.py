"""The pure maths against numbers worked by hand and plain loops, and the invariances a step relies on."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.algorithms.advantages import ADVANTAGES, dr_grpo, grpo, rloo
from grpo_dist.algorithms.aggregation import MODES, aggregate
from grpo_dist.algorithms.kl import KL_ESTIMATORS, k1, k2, k3
from grpo_dist.algorithms.offpolicy import KINDS, LEVELS, correction
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES, ppo_clip

NAN, INF = math.nan, math.inf


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def row(*values):
    return tensor(*values, dtype=torch.float64)[None]


def close(actual, expected, tolerance=1e-7):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


# --- advantages


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


# --- KL


def test_kl_estimators_have_their_golden_values():
    reference = row(-1, -2, -3)
    d = row(0.5, -1, 0)
    close(k1(reference + d, reference), row(0.5, -1, 0))
    close(k2(reference + d, reference), row(0.125, 0.5, 0))
    close(k3(reference + d, reference), row(0.1065307, 0.7182818, 0))


@pytest.mark.parametrize("d", [-50.0, -20.0, -12.0, 12.0, 50.0])
@pytest.mark.parametrize(
    ("name", "slope"), [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: -math.expm1(-d))]
)
def test_kl_gradient_lives_where_divergence_is_largest(name, slope, d):
    logprobs = torch.tensor([[-60.0 + d]], requires_grad=True)
    KL_ESTIMATORS[name](logprobs, torch.full((1, 1), -60.0)).sum().backward()
    assert float(logprobs.grad) == pytest.approx(slope(d), rel=1e-6)


def test_k3_stays_exact_where_policies_almost_agree():
    d = torch.tensor([[1e-3, -1e-4, 1e-5]])
    close(k3(d, torch.zeros(1, 3)) / (d**2 / 2), torch.ones(1, 3), 2e-2)
    assert (k3(torch.randn(1, 1000) * 1e-4, torch.zeros(1, 1000)) > -1e-7).all()


def test_expectations_of_the_estimators_are_the_divergence():
    """Exact over a vocabulary, for samples of the policy: E[k1] = E[k3] = KL(policy, ref); the mean gradients
    of k1, k2 and k3 are 0, that of KL(policy, ref) and that of KL(ref, policy).
    """
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 1, 50, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = logits.log_softmax(1), other.log_softmax(1)
    p = logp.detach().exp()
    kl = (logp.exp() * (logp - ref)).sum()
    close((p * k1(logp, ref)).sum().detach(), kl.detach(), 1e-12)
    close((p * k3(logp, ref)).sum().detach(), kl.detach(), 1e-12)
    reverse = (ref.exp() * (ref - logp)).sum()
    for estimator, target in ((k1, 0 * kl), (k2, kl), (k3, reverse)):
        (expected,) = torch.autograd.grad(target, logits, retain_graph=True)
        (actual,) = torch.autograd.grad((p * estimator(logp, ref)).sum(), logits, retain_graph=True)
        close(actual, expected, 1e-12)


# --- policy loss


def clip_one(ratio, advantage, **bounds):
    """(loss, d loss / d logprob, stats) of a single token."""
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
        (0.5, 2.0, -1.0, -1.0, None),  # a good token that became rare is still raised
        (0.5, -2.0, 1.8, 0.0, "clip_low"),
        (0.95, -2.0, 1.9, 1.9, None),
        (5.0, -2.0, 10.0, 10.0, None),  # a bad token that became frequent is pushed with all it has
    ],
)
def test_clip_bounds_each_side_by_its_own(ratio, advantage, loss, gradient, clipped):
    actual, slope, stats = clip_one(ratio, advantage, clip_low=0.1, clip_high=0.3)
    assert (actual, slope) == (pytest.approx(loss), pytest.approx(gradient))
    assert (stats["clip_low"], stats["clip_high"]) == (clipped == "clip_low", clipped == "clip_high")
    assert stats["ratio"] == stats["ratio_max"] == pytest.approx(ratio)
    assert stats["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_dual_clip_caps_only_bad_tokens_and_only_when_asked():
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


# --- aggregation

LENGTHS = [5, 3, 1, 4, 2, 5, 2, 3]
GOLDEN = {
    "token-mean": 1.7960,
    "seq-mean-token-mean": 1.85625,
    "seq-mean-token-sum": 5.6125,
    "seq-mean-token-sum-norm": 1.12250,
}


def mask_of(lengths, width):
    return torch.arange(width)[None] < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize(("mode", "expected"), GOLDEN.items())
@pytest.mark.parametrize("number", [float, int])
def test_aggregation_has_its_golden_values(mode, expected, number):
    losses = torch.arange(40.0).view(8, 5) / 10
    value = aggregate(
        losses, mask_of(LENGTHS, 5), mode, num_tokens=number(25), num_sequences=number(8), max_tokens=5
    )
    assert float(value) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_partial_sums_over_any_split_add_up_to_the_whole(mode):
    generator = torch.Generator().manual_seed(2)
    losses = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask = mask_of(LENGTHS, 5)
    how = {"num_tokens": 25.0, "num_sequences": 8.0, "max_tokens": 5}
    whole = aggregate(losses, mask, mode, **how)
    for cut in range(9):
        parts = [aggregate(losses[rows], mask[rows], mode, **how) for rows in (slice(cut), slice(cut, None))]
        assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_with_nothing_unmasked_has_loss_and_gradient_zero(mode):
    losses = torch.full((3, 4), NAN, requires_grad=True)
    mask = torch.zeros(3, 4, dtype=torch.bool)
    value = aggregate(losses, mask, mode, num_tokens=0.0, num_sequences=0.0, max_tokens=4)
    value.backward()
    assert value.item() == 0.0 and torch.equal(losses.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_without_tokens_is_no_sequence(mode):
    losses = torch.arange(12.0).view(3, 4)
    mask = mask_of([2, 0, 3], 4)
    with_empty = aggregate(losses, mask, mode, num_tokens=5.0, num_sequences=2.0, max_tokens=4)
    rows = [0, 2]
    without = aggregate(losses[rows], mask[rows], mode, num_tokens=5.0, num_sequences=2.0, max_tokens=4)
    assert float(with_empty) == float(without)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="'mean': expected one of token-mean, seq-mean-token-mean"):
        aggregate(
            torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), "mean",
            num_tokens=1.0, num_sequences=1.0, max_tokens=1,
        )  # fmt: skip


# --- corrections

RATIOS = row(0.25, 1.0, 1.5, 4.0, 7.0)  # the last is masked
MASK = torch.tensor([[True, True, True, True, False]])


def weights_of(kind, level, low, high):
    zeros = torch.zeros_like(RATIOS)
    return correction(RATIOS.log(), zeros, MASK, kind=kind, level=level, low=low, high=high)


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
    by_level = {"token": RATIOS[MASK], "sequence": row(*[1.5] * 4), "geometric": row(*[1.5**0.25] * 4)}
    unbounded = by_level[level]
    assert float(stats["weight"]) == pytest.approx(float(unbounded.sum()))
    assert float(stats["weight_max"]) == pytest.approx(float(unbounded.max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_logprobs_have_weight_one_and_weights_carry_no_gradient(kind, level):
    logprobs = (-torch.rand(2, 6)).requires_grad_()
    mask = mask_of([4, 6], 6)
    weights, _ = correction(
        logprobs, logprobs.detach().clone(), mask, kind=kind, level=level, low=0.5, high=2
    )
    assert torch.equal(weights, mask.float()) and not weights.requires_grad
    assert weights.dtype == torch.float32


def test_extreme_ratios_stay_finite():
    logprobs = torch.tensor([[0.0, -1e4, 0.0]])
    rollout = torch.tensor([[-1e4, 0.0, -INF]])
    mask = torch.tensor([[True, True, True]])
    weights, _ = correction(logprobs, rollout, mask, kind="tis", level="token", low=0.1, high=2.0)
    close(weights, [[2.0, 0.1, 2.0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sis"}, "kind 'sis', level 'token': expected kind tis, mis, icepop"),
        ({"level": "word"}, "level 'word'"),
        ({"low": 2.0, "high": 2.0}, "low = 2.0, high = 2.0: expected 0 <= low < high"),
    ],
)
def test_an_unknown_correction_is_refused(change, message):
    how = {"kind": "tis", "level": "token", "low": 0.0, "high": 2.0} | change
    with pytest.raises(ValueError, match=message):
        correction(RATIOS, RATIOS, MASK, **how)


# --- masks


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30, -1e30])
def test_garbage_at_masked_positions_changes_nothing(garbage):
    generator = torch.Generator().manual_seed(3)
    clean = [torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(4)]
    mask = mask_of([5, 2, 0], 5)
    results = []
    for fill in (0.0, garbage):
        logprobs, old, rollout, advantages = (torch.where(mask, t, fill) for t in clean)
        logprobs.requires_grad_()
        losses, stats = ppo_clip(logprobs, old, advantages, mask, dual_clip=2.0)
        weights, more = correction(old, rollout, mask, kind="tis", level="sequence", low=0.0, high=2.0)
        total = aggregate(
            losses * weights, mask, "token-mean", num_tokens=7.0, num_sequences=2.0, max_tokens=5
        )
        (gradient,) = torch.autograd.grad(total, logprobs)
        assert torch.equal(gradient[~mask], torch.zeros(8, dtype=torch.float64))
        assert torch.equal(losses[~mask], torch.zeros(8, dtype=torch.float64))
        results.append([total.detach(), gradient, losses.detach(), weights, *stats.values(), *more.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_registries_hold_what_the_configuration_offers():
    assert set(ADVANTAGES) == {"grpo", "dr_grpo", "rloo"}
    assert set(KL_ESTIMATORS) == {"k1", "k2", "k3"}
    assert set(POLICY_LOSSES) == {"ppo_clip"}
    assert MODES == ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
