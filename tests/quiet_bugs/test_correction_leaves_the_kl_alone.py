"""ms-swift at 3602360 (`grpo_trainer.py`): the train/rollout correction multiplies the sum of policy loss and
KL. A token that the engine found too likely is then also pulled less to the reference, and a token with
weight 0 not at all.
"""

import numpy as np
import pytest
import torch

from grpo_dist.batch.rows import make_batch
from grpo_dist.policy.loss import batch_loss
from tests.support.losses import objective
from tests.support.made_groups import group_of

OURS, ENGINE, REFERENCE = -1.0, np.array([-1.0, -0.3, 1.0], np.float32), -2.0
COEF = 0.1


def gradient(**settings):
    group = group_of([1, 1], [3, 3])
    for rollout in group.rollouts:
        rollout.logprobs[:] = ENGINE
    reference = [np.full(3, REFERENCE, np.float32)] * 2
    advantages = [np.zeros(2, np.float32)]  # the KL alone moves the policy
    batch = make_batch([group], advantages, ref_logprobs=reference, max_new_tokens=3)
    logprobs = torch.full(batch.tokens.shape, OURS, requires_grad=True)
    how = objective(kl={"coef": COEF, "estimator": "k2"}, **settings)
    loss, _ = batch_loss(logprobs, batch, how)
    return torch.autograd.grad(loss, logprobs)[0][:, 2:]


def test_the_bug_weighs_the_pull_of_the_reference():
    weights = np.exp(OURS - ENGINE)
    weights = np.where(weights < 0.2, 0, weights)
    pull = COEF * (OURS - REFERENCE) / 6
    assert (weights * pull).tolist() == pytest.approx([pull, 0.4966 * pull, 0], rel=1e-3)


@pytest.mark.parametrize("kind", ["tis", "mis", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_kl_of_every_token_pulls_with_its_whole_weight(kind, level):
    how = {"correction": {"kind": kind, "level": level, "low": 0.2, "high": 2.0}}
    expected = torch.full((2, 3), COEF * (OURS - REFERENCE) / 6)
    torch.testing.assert_close(gradient(**how), expected)
    torch.testing.assert_close(gradient(), expected)
