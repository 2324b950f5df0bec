"""trl#6357, "Fix EOS being masked when pad_token_id equals eos_token_id", and trl#4970: the mask came from
token ids. Many models pad with the EOS id; no EOS was ever trained, and the model forgot how to stop.
"""

import numpy as np
import torch

from grpo_dist.batch.rows import make_batch
from grpo_dist.policy.loss import batch_loss
from tests.support.losses import objective
from tests.support.made_groups import group_of

EOS = 0  # also the padding: `make_batch` fills rows with 0
COMPLETIONS = [[7, 8, EOS], [9, EOS], [7, EOS, 8, 9]]  # the last one continues after an EOS


def build():
    group = group_of([1, 0, 0], [len(ids) for ids in COMPLETIONS])
    for rollout, ids in zip(group.rollouts, COMPLETIONS, strict=True):
        rollout.completion_ids[:] = ids
    group.prompt.token_ids[:] = [EOS, 5]  # a chat marker in the prompt has the id, too
    return make_batch([group], [np.ones(3, np.float32)], ref_logprobs=None, max_new_tokens=4)


def test_the_bug_masks_the_end_of_every_completion():
    batch = build()
    width = batch.tokens.shape[1] - 2
    by_id = batch.tokens[:, 2:] != EOS
    assert by_id.sum(dim=1).tolist() == [2, 1, 3]
    assert not by_id[0, 2] and not by_id[1, 1] and width == 4


def test_every_sampled_token_is_trained_and_no_padding():
    batch = build()
    assert not batch.policy.mask[:, :2].any()
    assert batch.policy.mask[:, 2:].int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.lengths.tolist() == [5, 4, 6] and batch.denominators.tokens == 9


def test_the_end_of_a_good_completion_becomes_likelier():
    batch = build()
    logprobs = torch.full(batch.tokens.shape, -1.0, requires_grad=True)
    loss, _ = batch_loss(logprobs, batch, objective())
    (slope,) = torch.autograd.grad(loss, logprobs)
    assert slope[0, 4] < 0 and slope[0, 4] == slope[0, 2]
    assert slope[0, 5] == 0
