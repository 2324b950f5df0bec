"""trl#6369, "dapo/cispo/vespo loss denominator ignores `mask_truncated_completions`": truncated completions
left the sum of the loss, but not its token denominator.

The thread's example: 30 tokens, 5 of them of a truncated completion, gave sum / 30 instead of sum / 25.
"""

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.aggregation import MODES
from grpo_dist.batch.rows import make_batch, split_updates
from grpo_dist.policy.loss import batch_loss
from tests.support.losses import objective
from tests.support.made_groups import group_of

LENGTHS, REASONS = [10, 5, 15], ["stop", "length", "stop"]


def batch_of(mask_truncated):
    group = group_of([1, 0, 1], LENGTHS, reasons=REASONS)
    advantage = np.full(3, -1.0, np.float32)  # a loss of 1 for every trained token
    return make_batch(
        [group], [advantage], ref_logprobs=None, max_new_tokens=15, mask_truncated=mask_truncated
    )


def loss(batch, mode="token-mean"):
    settings = objective(loss="policy_gradient", aggregation=mode)
    logprobs = torch.full(batch.tokens.shape, -1.0)
    return float(batch_loss(logprobs, batch, settings)[0])


def test_the_bug_divides_by_tokens_that_are_not_trained():
    batch = batch_of(True)
    trained, everything = int(batch.policy.mask.sum()), int(batch_of(False).policy.mask.sum())
    assert (trained, everything) == (25, 30)
    assert trained / everything == pytest.approx(0.8333, abs=1e-4)  # for a loss of 1


def test_sum_and_denominator_count_the_same_tokens():
    batch = batch_of(True)
    assert (batch.denominators.tokens, batch.denominators.sequences) == (25, 2)
    assert loss(batch) == 1 and loss(batch_of(False)) == 1


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_a_batch_without_the_truncated_completion(mode):
    group = group_of([1, 1], [10, 15])
    alone = make_batch([group], [np.full(2, -1.0, np.float32)], ref_logprobs=None, max_new_tokens=15)
    assert loss(batch_of(True), mode) == pytest.approx(loss(alone, mode), rel=1e-6)


def test_each_update_of_a_step_counts_only_its_tokens():
    groups = [group_of([1, 0], [10, 5], reasons=["stop", "length"]), group_of([1, 0], [4, 8])]
    advantages = [np.full(2, -1.0, np.float32)] * 2
    batch = make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=15, mask_truncated=True)
    updates = split_updates(batch, num_groups=2, num_updates=2)
    assert [update.denominators.tokens for update in updates] == [10, 12]
    assert [loss(update) for update in updates] == [1, 1]
