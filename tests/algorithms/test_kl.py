"""KL estimators: golden values, gradients at extreme divergence, expectations."""

import math

import pytest
import torch

from grpo_dist.algorithms.kl import KL_ESTIMATORS, k1, k2, k3
from grpo_dist.algorithms.schedules import next_kl_coef
from tests.support.numbers_by_hand import close, row


def test_kl_estimators_have_their_golden_values():
    reference = row(-1, -2, -3)
    d = row(0.5, -1, 0)
    close(k1(reference + d, reference), row(0.5, -1, 0))
    close(k2(reference + d, reference), row(0.125, 0.5, 0))
    close(k3(reference + d, reference), row(0.1065307, 0.7182818, 0))
    close(KL_ESTIMATORS["abs"](reference + d, reference), row(0.5, 1, 0))


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


@pytest.mark.parametrize(("name", "value"), [("k1+", k1), ("k3+", k3)])
def test_straight_through_forms_have_their_value_and_the_gradient_of_k2(name, value):
    logprobs = row(-1.0, -2.0, -3.0, -40.0).requires_grad_()
    reference = row(-1.5, -1.0, -3.0, -1.0)
    got = KL_ESTIMATORS[name](logprobs, reference)
    assert torch.equal(got, value(logprobs, reference))
    (gradient,) = torch.autograd.grad(got.sum(), logprobs)
    close(gradient, row(0.5, -1.0, 0.0, -39.0), 1e-12)


def test_gradients_in_expectation_are_those_of_the_divergence_only_with_k2():
    """A sum over a small distribution makes the expectations exact."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    divergence = (logp.exp() * (logp - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    def gradient(name):
        values = KL_ESTIMATORS[name](logp[None], reference[None])[0]
        return torch.autograd.grad((logp.exp().detach() * values).sum(), logits, retain_graph=True)[0]

    for name in ("k2", "k1+", "k3+"):
        close(gradient(name), expected.detach(), 1e-12)
    close(gradient("k1"), torch.zeros(4), 1e-12)
    assert float((gradient("k3") - expected).norm() / expected.norm()) > 0.2


def test_the_kl_weight_moves_towards_the_target():
    how = {"target": 0.1, "gain": 0.5}
    assert next_kl_coef(0.2, 0.1, **how) == 0.2
    assert next_kl_coef(0.2, 0.11, **how) == pytest.approx(0.2 * (1 + 0.5 * 0.1))
    assert next_kl_coef(0.2, 9.0, **how) == pytest.approx(0.2 * 1.1)
    assert next_kl_coef(0.2, 0.0, **how) == pytest.approx(0.2 * 0.9)
    assert next_kl_coef(0.2, math.nan, **how) == 0.2


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
