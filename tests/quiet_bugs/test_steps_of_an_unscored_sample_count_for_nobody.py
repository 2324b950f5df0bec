"""A bug of this project, found on 2026-11-23: a sample without a reward is not trained, but its step scores
stayed in the statistics of its group, and moved the baseline of the other samples. NeMo-Gym#3351 reports the
same for whole rewards: the last of the rewards [1, 3, 2, 0] is a placeholder.

Steps of 1 and of 0, and a lost sample with three steps of 1: the mean was 0.8 instead of 0.5.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_dist.batch.credit_assignment import sample_advantages, token_advantages
from grpo_dist.batch.rows import make_batch
from tests.support.losses import credit
from tests.support.made_groups import group_of

STEPS = [[1.0], [0.0], [1.0, 1.0, 1.0]]
LENGTHS = [1, 1, 3]


def credited(rewards):
    """Return token advantages of samples with these rewards, minus the mean of their group's steps."""
    count = len(rewards)
    group = replace(
        group_of(rewards, LENGTHS[:count], prompt_tokens=2),
        step_rewards=tuple(np.array(steps, np.float32) for steps in STEPS[:count]),
        step_ends=tuple(np.arange(n, dtype=np.int32) for n in LENGTHS[:count]),
    )
    settings = credit("process", std="none")
    batch = make_batch([group], sample_advantages([group], settings), ref_logprobs=None, max_new_tokens=3)
    return token_advantages(batch, [group], settings)


def test_the_bug_moves_the_baseline_of_the_others():
    together = np.concatenate(STEPS)
    assert together.mean() == pytest.approx(0.8)
    assert np.array([1.0, 0.0]) - together.mean() == pytest.approx([0.2, -0.8])


def test_the_others_have_the_advantages_of_a_group_without_it():
    batch, alone = credited([1, 0, float("nan")]), credited([1, 0])
    assert batch.policy.advantages[:2, 2].tolist() == alone.policy.advantages[:, 2].tolist() == [0.5, -0.5]
    assert not batch.policy.advantages[2].any() and not batch.policy.mask[2].any()


def test_a_scored_sample_does_count():
    batch = credited([1, 0, 1])
    torch.testing.assert_close(batch.policy.advantages[:2, 2], torch.tensor([0.2, -0.8]))


def test_a_placeholder_reward_is_in_no_baseline():
    """[1, 3, 2] have mean 2; with the placeholder 0 it would be 1.5."""
    group = group_of([1, 3, 2, float("nan")], [1] * 4)
    (advantages,) = sample_advantages([group], credit("dr_grpo"))
    assert advantages.tolist() == [-1, 1, 0, 0]
