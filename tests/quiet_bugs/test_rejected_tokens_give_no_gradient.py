"""verl#6362, "mask rewards in outcome estimators": a reward that lies on a token which rejection has removed
still made an advantage for the tokens that were kept.

Two samples of 24 tokens; the last one of the first sample is rejected, and the reward of 1 lies on it. The
thread's numbers: advantages 0.5 and -0.5 and a gradient of norm 2.755, where its fix has 0.
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


def made(engine_logprobs=None):
    """The batch of a right and a wrong sample; ``engine_logprobs`` [C] of the first one."""
    group = group_of([1, 0], [LENGTH, LENGTH], prompt_tokens=PROMPT)
    if engine_logprobs is not None:
        group.rollouts[0].logprobs[:] = engine_logprobs
    advantages = sample_advantages([group], credit("dr_grpo"))
    return make_batch([group], advantages, ref_logprobs=None, max_new_tokens=LENGTH)


def gradient(batch, **settings):
    """The gradient of the loss in the trainer's log-probs, which are -1 everywhere."""
    logprobs = torch.full(batch.tokens.shape, -1.0, requires_grad=True)
    loss, _ = batch_loss(logprobs, batch, objective(**settings))
    (found,) = torch.autograd.grad(loss, logprobs)
    return found[:, PROMPT:]


def test_the_bug_gives_the_kept_tokens_an_advantage():
    rewards, kept = torch.zeros(2, LENGTH), torch.ones(2, LENGTH)
    rewards[0, -1], kept[0, -1] = 1.0, 0.0
    scores = rewards.sum(dim=1)  # of all tokens, the rejected one among them
    advantages = (scores - scores.mean())[:, None] * kept
    assert advantages[0].tolist() == [0.5] * 23 + [0.0] and advantages[1].tolist() == [-0.5] * 24
    assert not ((rewards * kept).sum(dim=1) - (rewards * kept).sum(dim=1).mean()).any()


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_a_rejected_token_has_gradient_0_under_every_loss(loss):
    """Also where a loss reads the tokens of a sample together, as GMPO's mean does."""
    engine = np.full(LENGTH, -1.0, np.float32)
    engine[-1] = 2.0
    found = gradient(made(engine), loss=loss, correction={"kind": "mis", "low": 0.5, "high": 2.0})
    assert found[0, -1] == 0


def test_a_rejected_token_has_gradient_0_and_changes_no_other():
    """The trainer finds the token e^3 times less likely than the engine, outside [0.5, 2]."""
    engine = np.full(LENGTH, -1.0, np.float32)
    engine[-1] = 2.0
    rejected = gradient(made(engine), correction={"kind": "mis", "low": 0.5, "high": 2.0})
    everything = gradient(made())
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
    engine = np.full(LENGTH, -1.0, np.float32)
    engine[-1] = 2.0
    found = gradient(made(engine), correction=rejection)
    assert not found[0].any() and torch.equal(found[1], gradient(made())[1])


def test_a_sample_whose_own_log_prob_is_unknown_is_not_in_the_batch_at_all():
    engine = np.full(LENGTH, -1.0, np.float32)
    engine[-1] = np.nan
    batch = made(engine)
    assert not batch.policy.mask[0].any() and not batch.policy.advantages[0].any()
    assert (batch.denominators.tokens, batch.denominators.sequences) == (24, 1)
