"""Divergences over a teacher's likeliest tokens: numbers by hand, and what holds for any distributions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.algorithms.kl import DIVERGENCES

VOCABULARY = 9
EXACT = {
    "reverse": lambda p, q: (q * (q / p).log()).sum(-1),
    "forward": lambda p, q: (p * (p / q).log()).sum(-1),
    "jensen_shannon": lambda p, q: (
        ((p * (2 * p / (p + q)).log()).sum(-1) + (q * (2 * q / (p + q)).log()).sum(-1)) / 2
    ),
}


def divergence(name, q, p):
    """``q``, ``p``: probabilities [K] of the teacher's likeliest tokens."""
    return DIVERGENCES[name](*(torch.tensor(x).log()[None, None] for x in (q, p)))[0, 0].item()


def distributions(seed, count=4, spread=2.0):
    """Logits of a policy and log-probs of a teacher, float64 [1, count, V]."""
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
    """The policy gives the teacher's likeliest tokens a quarter each, the teacher a half and a quarter."""
    assert divergence(name, [0.25, 0.25], [0.5, 0.25]) == pytest.approx(expected, rel=1e-6)
    assert expected > 0


@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), count=st.integers(1, VOCABULARY))
def test_it_is_at_most_that_of_the_whole_distributions_and_not_negative(name, seed, count):
    """And that itself with all tokens (the rest of 1 is then 0, and counts as 1e-5 for both)."""
    logits, teacher = distributions(seed)
    policy, (top, ids) = logits.log_softmax(-1), teacher.topk(count, dim=-1)
    found = DIVERGENCES[name](policy.gather(-1, ids), top)
    whole = EXACT[name](teacher.exp(), policy.exp())
    assert (found > -1e-9).all() and (found <= whole + 1e-9).all()
    if count == VOCABULARY:
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_with_all_tokens_its_gradient_is_that_of_the_whole_distributions(name, seed):
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
    """What it does among the others is not seen."""
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
    """The teacher gives these 0.7. Below 1e-5 the pull falls with what the policy leaves, and is not lost."""
    logits = torch.tensor([[[1 - left, left / 2, left / 2]]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[[0.7]]], dtype=torch.float64).log()
    DIVERGENCES["forward"](logits.log_softmax(-1)[..., :1], teacher).sum().backward()
    expected = (1 - left) - 0.7  # of the whole: q - p
    share = min(1.0, left / 1e-5)
    assert logits.grad[0, 0, 0].item() == pytest.approx(share * expected, rel=1e-3)
    assert logits.grad[0, 0, 1:].sum().item() == pytest.approx(-share * expected, rel=1e-3)
