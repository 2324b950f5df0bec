"""miles#1383, "gate REINFORCE++ KL by the loss mask in returns", and slime#1370: the KL in the reward was
also summed over tool tokens, and charged to the actions before them.

The thread's numbers: mask [1, 0, 0, 1], a KL of 1 each, a discount of 0.9: the return of the first token
should be -1.729, and was -3.439.
"""

import numpy as np
import pytest

from grpo_dist.batch.credit_assignment import token_advantages
from grpo_dist.batch.rows import make_batch
from grpo_dist.types import Group, Prompt, Rollout
from tests.support.losses import credit

MASK = np.array([True, False, False, True])


def returns(kl, discount):
    result, running = [], 0.0
    for value in reversed(kl):
        running = -value + discount * running
        result.append(running)
    return result[::-1]


def test_the_bug_charges_the_action_for_the_tools_tokens():
    assert returns(np.ones(4), 0.9)[0] == pytest.approx(-3.439)
    assert returns(np.ones(4) * MASK, 0.9)[0] == pytest.approx(-1.729)


@pytest.mark.parametrize("tool_kl", [0.0, 1.0, 1e6, np.nan])
def test_an_action_pays_for_its_tokens_and_those_of_later_actions(tool_kl):
    """``tool_kl``: any KL at the tool's tokens. Sampled tokens have a KL of 1."""
    ids, versions = np.array([5, 6, 7, 8], np.int32), np.where(MASK, 0, -1).astype(np.int32)
    logprobs = np.where(MASK, -1.0, 0.0).astype(np.float32)
    rollouts = tuple(Rollout("p", i, ids, logprobs, "stop", "x", versions, MASK) for i in range(2))
    rewards = np.zeros(2, np.float32)
    group = Group(Prompt("p", np.array([1, 2], np.int32), "", "made"), rollouts, rewards, {}, ("", ""))
    reference = [np.where(MASK, -2.0, -tool_kl).astype(np.float32)] * 2
    batch = make_batch([group], [rewards], ref_logprobs=reference, max_new_tokens=9)
    result = token_advantages(batch, [group], credit(kl_coef=1.0, kl={"estimator": "k1"}))
    assert result.policy.advantages.tolist() == [[0, 0, -2, 0, 0, -1]] * 2
    assert returns(np.ones(4), 1.0)[0] == -4  # with the tool's tokens
