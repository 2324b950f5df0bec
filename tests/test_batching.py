"""Groups to rows, and rows to updates, ranks and micro-batches."""

import numpy as np
import pytest
import samples_of_groups
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_dist.batching import compute_advantages, make_batch, micro_batches, shard, split_updates
from grpo_dist.types import Group, Prompt, Rollout


def rollout(uid, sample, ids):
    ids = np.array(ids, np.int32)
    return Rollout(
        uid, sample, ids, -np.arange(1, len(ids) + 1, dtype=np.float32), "stop", "", np.zeros_like(ids)
    )


def two_groups(rewards=((1.0, 0.0), (0.5, 0.5))):
    prompts = [
        Prompt("a", np.array([7, 8, 9], np.int32), "1", "s"),
        Prompt("b", np.array([7], np.int32), "2", "s"),
    ]
    completions = [([4, 5, 2], [4]), ([6, 2], [6, 6, 6, 6])]
    return [
        Group(p, tuple(rollout(p.uid, i, c) for i, c in enumerate(cs)), np.array(r, np.float32), {}, ("", ""))
        for p, cs, r in zip(prompts, completions, rewards, strict=True)
    ]


def test_rows_by_hand():
    groups = two_groups()
    advantages = [np.array([1.0, -1.0], np.float32), np.array([2.0, -2.0], np.float32)]
    reference = [-np.ones(len(r.completion_ids), np.float32) for g in groups for r in g.rollouts]
    batch = make_batch(groups, advantages, ref_logprobs=reference, max_new_tokens=8)
    assert batch.tokens.tolist() == [
        [7, 8, 9, 4, 5, 2],
        [7, 8, 9, 4, 0, 0],
        [7, 6, 2, 0, 0, 0],
        [7, 6, 6, 6, 6, 0],
    ]
    assert batch.lengths.tolist() == [6, 4, 3, 5]
    assert batch.loss_mask.int().tolist() == [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 1, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 1, 0],
    ]
    assert batch.advantages[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.rollout_logprobs[3].tolist() == [0, -1, -2, -3, -4, 0]
    assert batch.ref_logprobs[2].tolist() == [0, -1, -1, 0, 0, 0]
    assert (batch.num_tokens, batch.num_sequences, batch.max_tokens) == (10.0, 4.0, 8)
    assert batch.old_logprobs is None


def test_the_end_token_is_trained_and_masks_come_from_lengths():
    """The end token 2 and the padding token 0 are trained where the model produced them."""
    prompt = Prompt("a", np.array([2, 0], np.int32), "1", "s")
    group = Group(prompt, (rollout("a", 0, [0, 2]),), np.ones(1, np.float32), {}, ("",))
    batch = make_batch([group], [np.ones(1, np.float32)], ref_logprobs=None, max_new_tokens=4)
    assert batch.loss_mask.tolist() == [[False, False, True, True]]


def test_an_unscored_sample_is_a_row_that_counts_for_nothing():
    groups = two_groups(rewards=((1.0, np.nan), (0.0, 1.0)))
    advantages = compute_advantages(groups, "grpo", std="group", eps=1e-6)
    batch = make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=8)
    assert not batch.loss_mask[1].any()
    assert (batch.num_tokens, batch.num_sequences) == (9.0, 3.0)
    assert torch.isfinite(batch.advantages).all()


def test_advantages_see_the_whole_step():
    groups = two_groups(rewards=((0.0, 2.0), (1.0, 5.0)))
    first, second = compute_advantages(groups, "grpo", std="batch", eps=1e-12)
    assert np.allclose([*first, *second], np.array([-1, 1, -2, 2]) / np.sqrt(5), atol=1e-6)


def test_updates_take_whole_groups_with_their_own_denominators():
    batch = samples_of_groups.batch(groups=4, samples=3)
    parts = split_updates(batch, num_groups=4, num_updates=2)
    assert [len(p) for p in parts] == [6, 6]
    for part in parts:
        assert part.num_tokens == float(part.loss_mask.sum())
        assert part.tokens.shape[1] == int(part.lengths.max())
    assert sum(p.num_tokens for p in parts) == batch.num_tokens


def test_shards_keep_the_denominators_of_the_whole_and_balance_tokens():
    batch = samples_of_groups.batch(groups=4, samples=8, longest=40)
    parts = shard(batch, 4)
    assert {(p.num_tokens, p.num_sequences) for p in parts} == {(batch.num_tokens, batch.num_sequences)}
    loads = [int(p.lengths.sum()) for p in parts]
    assert max(loads) - min(loads) <= int(batch.lengths.max())
    assert sum(loads) == int(batch.lengths.sum())


def test_more_ranks_than_rows_leaves_some_without():
    parts = shard(samples_of_groups.batch(groups=1, samples=2), 3)
    assert sorted(len(p) for p in parts) == [0, 1, 1]


def test_micro_batches_by_hand():
    assert micro_batches([3, 9, 4, 8], 18) == [[1, 3], [2, 0]]
    assert micro_batches([], 18) == []
    assert micro_batches([50], 18) == [[0]]


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 200))
def test_micro_batches_keep_to_the_budget_and_take_every_row_once(lengths, budget):
    parts = micro_batches(lengths, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(len(p) == 1 or len(p) * max(lengths[i] for i in p) <= budget for p in parts)


def test_selecting_rows_does_not_change_the_batch():
    batch = samples_of_groups.batch()
    kept = batch.tokens.clone()
    part = batch.select([2, 0])
    part.tokens.fill_(0)
    assert torch.equal(batch.tokens, kept)
    assert part.lengths.tolist() == [int(batch.lengths[2]), int(batch.lengths[0])]
    with pytest.raises(AttributeError):
        batch.num_tokens = 3.0
