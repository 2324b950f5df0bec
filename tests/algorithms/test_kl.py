"""KL estimators, binary divergences and teacher divergences: golden values, gradients, expectations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.algorithms.kl import DIVERGENCES, KL_ESTIMATORS, binary_kl, k3, total_variation
from grpo_dist.algorithms.schedules import steer
from tests.support.numbers_by_hand import close, row


@pytest.mark.parametrize(
    ("name", "values", "gradient"),
    [
        ("k1", (0.5, -1, 0), (1, 1, 1)),
        ("k2", (0.125, 0.5, 0), (0.5, -1, 0)),
        ("k3", (0.1065307, 0.7182818, 0), (0.3934693, -1.7182818, 0)),
        ("k1+", (0.5, -1, 0), (0.5, -1, 0)),
        ("k3+", (0.1065307, 0.7182818, 0), (0.5, -1, 0)),
        ("abs", (0.5, 1, 0), (1, -1, 0)),
    ],
)
def test_kl_estimators_have_their_golden_values_and_slopes(name, values, gradient):
    """The straight-through forms have the value of k1 or k3 and the gradient of k2."""
    reference = row(-1, -2, -3)
    logprobs = (reference + row(0.5, -1, 0)).requires_grad_()
    estimates = KL_ESTIMATORS[name](logprobs, reference)
    close(estimates.detach(), row(*values))
    close(torch.autograd.grad(estimates.sum(), logprobs)[0], row(*gradient))


def test_expectations_of_the_estimators_are_the_divergence():
    """Exact over a vocabulary, for samples of the policy: E[k1] = E[k3] = KL(policy, ref). The mean gradient
    of k1 is 0; k3 has the gradient of KL(ref, policy), k2 and straight-through forms of KL(policy, ref).
    """
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 1, 50, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp, ref = logits.log_softmax(1), other.log_softmax(1)
    p = logp.detach().exp()
    kl, reverse = (logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    targets = {"k1": 0 * kl, "k2": kl, "k1+": kl, "k3+": kl, "k3": reverse}
    for name, target in targets.items():
        estimates = (p * KL_ESTIMATORS[name](logp, ref)).sum()
        if name != "k2":
            close(estimates.detach(), kl.detach(), 1e-12)
        expected, actual = (
            torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (target, estimates)
        )
        close(actual, expected, 1e-12)


@pytest.mark.parametrize("d", [-50.0, -20.0, -12.0, 12.0, 50.0])
@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("k1", lambda d: 1.0),
        ("abs", lambda d: math.copysign(1.0, d)),
        ("k2", lambda d: d),
        ("k3", lambda d: -math.expm1(-d)),
    ],
)
def test_the_kl_gradient_does_not_vanish_where_divergence_is_largest(name, slope, d):
    logprobs = torch.tensor([[-60.0 + d]], requires_grad=True)
    KL_ESTIMATORS[name](logprobs, torch.full((1, 1), -60.0)).sum().backward()
    assert float(logprobs.grad) == pytest.approx(slope(d), rel=1e-6)


def test_k3_stays_exact_where_policies_almost_agree():
    d = torch.tensor([[1e-3, -1e-4, 1e-5]])
    close(k3(d, torch.zeros(1, 3)) / (d**2 / 2), torch.ones(1, 3), 2e-2)
    assert (k3(torch.randn(1, 1000) * 1e-4, torch.zeros(1, 1000)) > -1e-7).all()


@pytest.mark.parametrize("name", ["k1+", "k3+"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_straight_through_forms_are_finite_where_their_gradient_is(name, dtype):
    logprobs = torch.full((1, 1), -300.0, dtype=dtype, requires_grad=True)
    value = KL_ESTIMATORS[name](logprobs, torch.zeros(1, 1, dtype=dtype))
    value.sum().backward()
    assert value.isfinite().all() and logprobs.grad.item() == -300.0


def test_half_precision_logprobs_give_the_divergence_of_their_exact_values():
    logprobs, reference = (torch.tensor([[v]], dtype=torch.bfloat16) for v in (-7.96875, -0.0018))
    for name, estimator in KL_ESTIMATORS.items():
        exact = estimator(logprobs.double(), reference.double())
        got = estimator(logprobs, reference).double()
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=0, msg=name)


def test_the_kl_weight_moves_towards_the_target():
    how = {"target": 0.1, "gain": 0.5}
    assert steer(0.2, 0.1, **how) == 0.2
    assert steer(0.2, 0.11, **how) == pytest.approx(0.2 * (1 + 0.5 * 0.1))
    assert steer(0.2, 9.0, **how) == pytest.approx(0.2 * 1.1)
    assert steer(0.2, 0.0, **how) == pytest.approx(0.2 * 0.9)
    assert steer(0.2, math.nan, **how) == 0.2


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


VOCABULARY = 9
EXACT = {
    "reverse": lambda p, q: (q * (q / p).log()).sum(-1),
    "forward": lambda p, q: (p * (p / q).log()).sum(-1),
    "jensen_shannon": lambda p, q: (
        ((p * (2 * p / (p + q)).log()).sum(-1) + (q * (2 * q / (p + q)).log()).sum(-1)) / 2
    ),
}


def divergence(name, q, p):
    """Return the divergence of ``q`` and ``p``, probabilities [K] of the teacher's top-k tokens."""
    return DIVERGENCES[name](*(torch.tensor(x).log()[None, None] for x in (q, p)))[0, 0].item()


def distributions(seed, count=4, spread=2.0):
    """Return logits of a policy and log-probs of a teacher, float64 [1, count, V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, 1, count, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits[0], logits[1].log_softmax(-1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reverse", 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.25) + 0.5 * math.log(0.5 / 0.25)),
        ("forward", 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.25) + 0.25 * math.log(0.25 / 0.5)),
        (
            "jensen_shannon",
            (0.5 * math.log(0.5 / 0.375) + 0.25 * math.log(0.25 / 0.375)) / 2
            + (0.25 * math.log(0.25 / 0.375) + 0.5 * math.log(0.5 / 0.375)) / 2,
        ),
    ],
)
def test_two_tokens_and_any_other_are_three_events(name, expected):
    """The policy gives the teacher's top 2 tokens a quarter each, the teacher a half and a quarter."""
    assert divergence(name, [0.25, 0.25], [0.5, 0.25]) == pytest.approx(expected, rel=1e-6)
    assert expected > 0


@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), count=st.integers(1, VOCABULARY))
def test_the_top_k_divergence_is_at_most_that_of_the_whole_distributions_and_not_negative(name, seed, count):
    """With all tokens they are equal (the remaining mass is 0, and counts as 1e-5 for both)."""
    logits, teacher = distributions(seed)
    policy, (top, ids) = logits.log_softmax(-1), teacher.topk(count, dim=-1)
    actual = DIVERGENCES[name](policy.gather(-1, ids), top)
    whole = EXACT[name](teacher.exp(), policy.exp())
    assert (actual > -1e-9).all() and (actual <= whole + 1e-9).all()
    if count == VOCABULARY:
        torch.testing.assert_close(actual, whole)


@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_with_all_tokens_the_gradient_is_that_of_the_whole_distributions(name, seed):
    logits, teacher = distributions(seed)
    gradients = []
    for whole in (False, True):
        leaf = logits.clone().requires_grad_()
        policy = leaf.log_softmax(-1)
        value = EXACT[name](teacher.exp(), policy.exp()) if whole else DIVERGENCES[name](policy, teacher)
        value.sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_policy_that_agrees_on_these_tokens_has_no_gradient(name):
    """Its probabilities of the other tokens do not matter."""
    logits, teacher = distributions(3)
    top, ids = teacher.topk(4, dim=-1)
    others = torch.ones(teacher.shape, dtype=torch.bool).scatter(-1, ids, False)
    mass = (1 - top.exp().sum(-1, keepdim=True)).log()
    within = torch.where(others, logits, -torch.inf).log_softmax(-1) + mass
    leaf = torch.where(others, within, teacher).requires_grad_()
    value = DIVERGENCES[name](leaf.log_softmax(-1).gather(-1, ids), top)
    value.sum().backward()
    assert value.abs().max() < 1e-12 and leaf.grad.abs().max() < 1e-12


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("ruled_out", ["by the teacher", "by the policy", "by both"])
def test_probabilities_of_nearly_0_and_1_keep_value_and_gradient_finite(name, ruled_out):
    """In float32, also for a token that the teacher or the policy rules out."""
    logits = torch.tensor([[[80.0, 0.0, -80.0], [0.0, 80.0, 0.0]]])
    teacher = torch.tensor([[[0.0, -90.0], [0.0, -90.0]]])
    if ruled_out != "by the policy":
        teacher[..., 1] = -torch.inf
    if ruled_out != "by the teacher":
        logits[0, 0, 1] = -torch.inf
    logits.requires_grad_()
    value = DIVERGENCES[name](logits.log_softmax(-1)[..., :2], teacher)
    value.sum().backward()
    assert value.isfinite().all() and logits.grad.isfinite().all()
    assert value[0, 0] < 1e-6 and value[0, 1] > 0.6


@pytest.mark.parametrize("left", [1e-3, 4e-5, 5e-6, 1e-6])
def test_a_policy_that_is_sure_of_the_teachers_tokens_is_pulled_back_to_the_others(left):
    """The teacher gives these 0.7. With less than 1e-5 left, the pull shrinks but does not vanish."""
    logits = torch.tensor([[[1 - left, left / 2, left / 2]]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[[0.7]]], dtype=torch.float64).log()
    DIVERGENCES["forward"](logits.log_softmax(-1)[..., :1], teacher).sum().backward()
    expected = (1 - left) - 0.7  # q - p, the exact gradient
    share = min(1.0, left / 1e-5)
    assert logits.grad[0, 0, 0].item() == pytest.approx(share * expected, rel=1e-3)
    assert logits.grad[0, 0, 1:].sum().item() == pytest.approx(-share * expected, rel=1e-3)
