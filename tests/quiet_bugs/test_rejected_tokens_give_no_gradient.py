"""verl#6362, "mask rewards in outcome estimators": a reward on a token that rejection had removed still gave
the kept tokens an advantage.

Two samples of 24 tokens; the last token of the first sample is rejected and has the reward of 1. The thread's
numbers: advantages 0.5 and -0.5 and a gradient of norm 2.755, which is 0 with its fix.
"""

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.batch.credit_assignment import sample_advantages
from grpo_dist.batch.rows import make_batch
from grpo_dist.policy.loss import batch_loss
from tests.support.losses import credit, objective
from tests.support.made_groups import group_of

LENGTH, PROMPT = 24, 2
MASK = {"kind": "mis", "low": 0.5, "high": 2.0}


def batch_of(last=-1.0):
    """Return a right and a wrong sample. ``last``: engine's log-prob of the last token of the right one."""
    group = group_of([1, 0], [LENGTH, LENGTH], prompt_tokens=PROMPT)
    group.rollouts[0].logprobs[-1] = last
    advantages = sample_advantages([group], credit("dr_grpo"))
    return make_batch([group], advantages, ref_logprobs=None, max_new_tokens=LENGTH)


def gradient(batch, **settings):
    """Return the gradient of the loss by the trainer's log-probs, which are all -1."""
    logprobs = torch.full(batch.tokens.shape, -1.0, requires_grad=True)
    loss, _ = batch_loss(logprobs, batch, objective(**settings))
    (gradients,) = torch.autograd.grad(loss, logprobs)
    return gradients[:, PROMPT:]


def test_the_bug_gives_the_kept_tokens_an_advantage():
    rewards, kept = torch.zeros(2, LENGTH), torch.ones(2, LENGTH)
    rewards[0, -1], kept[0, -1] = 1.0, 0.0
    scores = rewards.sum(dim=1)  # includes the rejected token
    advantages = (scores - scores.mean())[:, None] * kept
    assert advantages[0].tolist() == [0.5] * 23 + [0.0] and advantages[1].tolist() == [-0.5] * 24
    assert not ((rewards * kept).sum(dim=1) - (rewards * kept).sum(dim=1).mean()).any()


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_a_rejected_token_has_gradient_0_under_every_loss(loss):
    """Also where a loss reads the tokens of a sample together, as GMPO's mean does."""
    assert gradient(batch_of(2.0), loss=loss, correction=MASK)[0, -1] == 0


def test_a_rejected_token_has_gradient_0_and_changes_no_other():
    """The trainer finds the token e^3 times less likely than the engine, outside [0.5, 2]."""
    rejected, everything = gradient(batch_of(2.0), correction=MASK), gradient(batch_of())
    assert everything[0, -1] != 0 and rejected[0, -1] == 0
    assert torch.equal(rejected[0, :-1], everything[0, :-1]) and torch.equal(rejected[1], everything[1])


@pytest.mark.parametrize(
    "rejection",
    [
        {"kind": "mis", "level": "sequence", "low": 0.5},
        {"kind": "mis", "level": "geometric", "low": 0.95},
        {"kind": "tis", "veto": 0.1},
    ],
)
def test_a_rejected_sample_moves_nothing_wherever_its_reward_lies(rejection):
    rows = gradient(batch_of(2.0), correction=rejection)
    assert not rows[0].any() and torch.equal(rows[1], gradient(batch_of())[1])


def test_a_sample_with_an_unknown_engine_log_prob_is_not_in_the_batch_at_all():
    batch = batch_of(np.nan)
    assert not batch.policy.mask[0].any() and not batch.policy.advantages[0].any()
    assert (batch.denominators.tokens, batch.denominators.sequences) == (24, 1)
