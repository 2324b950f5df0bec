"""The bias-corrected KL: over samples of any engine it has the value and gradient of the divergence."""

import math

import pytest
import torch

from grpo_dist.policy.loss import batch_loss
from tests.support.losses import objective, train_batch

ENGINE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
REFERENCE = torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64)
TRAINER = torch.tensor([0.25, 0.45, 0.3], dtype=torch.float64)  # before the step, unlike the engine


def one_sample(token, logprob, *, old, engine):
    """Return the batch and log-probs of a row with the single completion token ``token`` and advantage 0."""

    def row(value):
        return torch.stack([torch.zeros((), dtype=torch.float64), value])[None]

    batch = train_batch(
        torch.tensor([[False, True]]), advantages=row(torch.tensor(0.0, dtype=torch.float64)),
        rollout_logprobs=row(engine), ref_logprobs=row(REFERENCE[token].log()),
        old_logprobs=None if old is None else row(old),
    )  # fmt: skip
    return batch, row(logprob)


@pytest.mark.parametrize("old_policy", ["trainer", "rollout"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_corrected_kl_is_unbiased_for_what_the_engine_sampled(old_policy, estimator):
    """The expectation over the engine's probabilities. The ratio to the trainer's old log-probs, which differ
    from the engine's, would give another value and another slope.
    """
    logits = torch.tensor([0.1, -0.4, 0.7], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    expected = (policy.exp() * (policy - REFERENCE.log())).sum()
    (slope,) = torch.autograd.grad(expected, logits, retain_graph=True)
    settings = objective(
        kl={"coef": 1.0, "estimator": estimator, "bias_correction": True},
        correction="bypass" if old_policy == "rollout" else "none",
    )
    total = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        engine = ENGINE[token].log()
        old = engine if old_policy == "rollout" else TRAINER[token].log()
        batch, logprobs = one_sample(token, policy[token], old=old, engine=engine)
        total = total + ENGINE[token] * batch_loss(logprobs, batch, settings)[0]
    (gradient,) = torch.autograd.grad(total, logits)
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-12)


def test_a_row_whose_engine_log_prob_is_unknown_keeps_its_kl_uncorrected():
    unknown = torch.tensor(math.nan, dtype=torch.float64)
    batch, logprobs = one_sample(
        0, torch.tensor(-1.0, dtype=torch.float64, requires_grad=True), old=None, engine=unknown
    )
    settings = objective(kl={"coef": 1.0, "bias_correction": True})
    d = -1.0 - float(REFERENCE[0].log())
    assert batch_loss(logprobs, batch, settings)[0].item() == pytest.approx(math.exp(-d) - 1 + d)
