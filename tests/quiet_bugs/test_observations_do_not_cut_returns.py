"""verl#6376, "skip tool observations in RF++ reward-to-go", and verl#7278: the reward-to-go scan restarted at
every untrained token, so that an action before a tool's answer lost the later reward.

The thread's numbers: rewards [0, 0, 1], mask [1, 0, 1] and a discount of 0.5 gave [0, 0.5, 1] instead of
[0.5, 1, 1].
"""

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.token_advantages import sum_to_go, turn_level
from grpo_dist.batch.credit_assignment import token_advantages
from grpo_dist.batch.rows import make_batch
from grpo_dist.types import Group, Prompt, Rollout, Turn
from tests.support.losses import credit

SAMPLED = np.array([True, False, True])  # an action, a tool's answer, an action


def returns_of_the_bug(rewards, mask, discount, *, resets):
    """Return the reward-to-go. ``resets``: an untrained token resets the running sum."""
    running, returns = torch.zeros(rewards.shape[0]), torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        if resets:
            returns[:, t] = rewards[:, t] + discount * running
            running = returns[:, t] * mask[:, t]
        else:
            running = torch.where(mask[:, t] > 0, rewards[:, t] + discount * running, running)
            returns[:, t] = running
    return returns


def episode(sample):
    ids = np.array([5, 6, 7], np.int32)
    turns = (Turn(0, 1, "call", "answer"), Turn(0, 3, "end"))
    logprobs, versions = np.where(SAMPLED, -1.0, 0.0).astype(np.float32), np.where(SAMPLED, 0, -1)
    return Rollout("p", sample, ids, logprobs, "stop", "end", versions.astype(np.int32), SAMPLED, turns)


def test_the_bug_loses_the_reward_in_front_of_the_observation():
    rewards, mask = torch.tensor([[0.0, 0, 1]]), torch.tensor([[1.0, 0, 1]])
    assert returns_of_the_bug(rewards, mask, 0.5, resets=True).tolist() == [[0, 0.5, 1]]
    assert returns_of_the_bug(rewards, mask, 0.5, resets=False).tolist() == [[0.5, 1, 1]]


@pytest.mark.parametrize(("discount", "first"), [(0.5, 0.5), (1.0, 1.0)])
def test_the_first_action_has_the_discounted_reward_of_the_last(discount, first):
    """Two actions: the first is one turn before the reward; the tool's answer is no turn."""
    prompt = Prompt("p", np.array([1, 2], np.int32), "", "made")
    rewards = np.array([1, 0], np.float32)
    group = Group(prompt, (episode(0), episode(1)), rewards, {}, ("", ""))
    batch = make_batch([group], [np.zeros(2, np.float32)], ref_logprobs=None, max_new_tokens=9)
    how = credit("turn", std="none", discount=discount)
    advantages = token_advantages(batch, [group], how).policy.advantages
    # Minus the mean over both samples, of which the other has no reward: half of each return remains.
    assert (2 * advantages[0]).tolist() == [0, 0, first, 0, 1]
    assert (advantages[0] + advantages[1]).tolist() == [0] * 5


def test_the_reward_to_go_passes_over_untrained_tokens():
    assert sum_to_go(torch.tensor([[0.0, 0, 1]])).tolist() == [[1, 1, 1]]
    two = turn_level(
        torch.tensor([0.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1.0]), torch.tensor([0]), discount=0.5
    )
    assert two.tolist() == [0, 0]  # one sample alone has no baseline
