"""verl#2928, "Why kld is clamped with min=-10": d is clamped to [-20, 20], then the k3 estimate to
[-10, 10]. Where policy and reference differ most, the gradient is 0, and nothing pulls the policy back.
"""

import pytest
import torch

from grpo_dist.algorithms.kl import KL_ESTIMATORS

FAR = [-29.0, -15.0, -5.0]  # log p of the policy minus log p of the reference


def clamped_k3(logprobs, reference):
    d = (reference - logprobs).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)


def slope(estimate, d):
    logprobs = torch.tensor([[d]], requires_grad=True)
    (gradient,) = torch.autograd.grad(estimate(logprobs, torch.zeros(1, 1)).sum(), logprobs)
    return float(gradient)


@pytest.mark.parametrize("d", FAR)
def test_the_bug_has_no_gradient_there(d):
    assert slope(clamped_k3, d) == 0
    assert clamped_k3(torch.tensor([[d]]), torch.zeros(1, 1)) == 10


@pytest.mark.parametrize("d", FAR)
@pytest.mark.parametrize("name", ["k2", "k3", "k1+", "k3+"])
def test_every_estimator_with_a_pull_pulls_hardest_there(name, d):
    """A negative slope raises the log-prob of a token that the policy finds far too unlikely."""
    estimate = KL_ESTIMATORS[name]
    assert slope(estimate, d) < slope(estimate, d / 2) < 0


def test_the_gradient_in_half_precision_is_that_of_float32():
    logprobs = torch.tensor([[-15.0]], dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        KL_ESTIMATORS["k3+"](logprobs, torch.zeros(1, 1, dtype=torch.bfloat16)).sum(), logprobs
    )
    assert float(gradient) == -15
