"""open-instruct#1794, "Fix advantages/batch desync when mask_truncated_completions drops samples": truncated
completions left the batch before the rewards were cut into groups of equal size. If the remaining
number was still divisible, samples were compared with samples of another prompt.
"""

import numpy as np

from grpo_dist.batch.credit_assignment import sample_advantages
from grpo_dist.batch.rows import make_batch
from tests.support.losses import credit
from tests.support.made_groups import group_of

REWARDS = np.array([[1, 0, 0, 0], [1, 1, 1, 0]], np.float32)
TRUNCATED = np.array([[False, True, True, True], [False, False, False, True]])


def groups():
    result = []
    for rewards, cut in zip(REWARDS, TRUNCATED, strict=True):
        reasons = ["length" if c else "stop" for c in cut]
        result.append(group_of(rewards.tolist(), [3] * 4, reasons=reasons))
    return result


def test_the_bug_compares_samples_of_two_prompts():
    kept = REWARDS.reshape(-1)[~TRUNCATED.reshape(-1)]
    mixed = kept.reshape(-1, 4)  # four remain: one "group" of both prompts
    assert mixed.shape == (1, 4) and not (mixed - mixed.mean()).any()


def test_every_sample_is_compared_with_samples_of_its_prompt():
    values = sample_advantages(groups(), credit("dr_grpo"))
    assert [v.tolist() for v in values] == [[0.75, -0.25, -0.25, -0.25], [0.25, 0.25, 0.25, -0.75]]


def test_truncated_samples_are_in_the_baseline_and_not_in_the_loss():
    advantages = sample_advantages(groups(), credit("dr_grpo"))
    batch = make_batch(groups(), advantages, ref_logprobs=None, max_new_tokens=3, mask_truncated=True)
    assert (~batch.policy.mask.any(dim=1)).tolist() == TRUNCATED.reshape(-1).tolist()
    assert batch.policy.advantages[:, -1].tolist() == [0.75, 0, 0, 0, 0.25, 0.25, 0.25, 0]
    assert batch.group_ids.tolist() == [0] * 4 + [1] * 4 and batch.denominators.sequences == 4
