"""KL estimators: golden values, gradients where they are hardest, expectations."""

import math

import pytest
import torch
from numbers_by_hand import close, row

from grpo_dist.algorithms.kl import KL_ESTIMATORS, k1, k2, k3


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
