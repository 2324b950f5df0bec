"""From groups to rows, and all later splits of rows."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.batch.credit_assignment import sample_advantages
from grpo_dist.batch.rows import make_batch, split_updates
from grpo_dist.batch.sharding import micro_batches
from grpo_dist.types import Group, Prompt, Rollout
from tests.support import made_groups
from tests.support.losses import credit
from tests.support.made_groups import shard


def group(prompt, completions, rewards):
    """Return a group; completion token i has log-prob -i / 10."""
    rollouts = tuple(
        Rollout(
            prompt_uid="p", sample=i, completion_ids=np.array(ids, np.int32),
            logprobs=-np.arange(len(ids), dtype=np.float32) / 10, finish_reason="stop", text="",
            policy_versions=np.zeros(len(ids), np.int32),
        )
        for i, ids in enumerate(completions)
    )  # fmt: skip
    head = Prompt("p", np.array(prompt, np.int32), "1", "made")
    return Group(head, rollouts, np.array(rewards, np.float32), {}, ("",) * len(rewards))


EOS = 2
GROUPS = [
    group([7, 8, 9], [[4, 5, EOS], [6]], [1, 0]),
    group([7], [[5, 5, 5, EOS], [EOS]], [math.nan, 1]),
]
ADVANTAGES = [np.array([1.0, -1.0], np.float32), np.array([0.0, 0.0], np.float32)]


def test_rows_are_prompt_then_completion_and_only_the_completion_is_trained():
    reference = [np.full(n, -float(n), np.float32) for n in (3, 1, 4, 1)]
    batch = make_batch(GROUPS, ADVANTAGES, ref_logprobs=reference, max_new_tokens=16)
    assert batch.tokens.tolist() == [
        [7, 8, 9, 4, 5, EOS],
        [7, 8, 9, 6, 0, 0],
        [7, 5, 5, 5, EOS, 0],
        [7, EOS, 0, 0, 0, 0],
    ]
    assert batch.lengths.tolist() == [6, 4, 5, 2]
    # The third row's reward is NaN: it keeps its tokens and enters no term.
    assert batch.policy.mask.int().tolist() == [
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
    ]
    assert batch.policy.advantages.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, -1, 0, 0], [0] * 6, [0] * 6]
    torch.testing.assert_close(batch.policy.rollout_logprobs[0], torch.tensor([0, 0, 0, 0, -0.1, -0.2]))
    assert batch.policy.ref_logprobs.tolist() == [
        [0, 0, 0, -3, -3, -3], [0, 0, 0, -1, 0, 0], [0] * 6, [0, -1, 0, 0, 0, 0],
    ]  # fmt: skip
    sizes = batch.denominators
    assert (sizes.tokens, sizes.sequences, batch.policy.max_tokens) == (5.0, 3.0, 16)
    assert batch.row_ids.tolist() == list(range(len(batch)))
    assert batch.tokens.dtype == torch.int64 and batch.policy.advantages.dtype == torch.float32


def test_masks_come_from_lengths_and_never_from_token_ids():
    """Token 0, the padding, and EOS inside prompt and completion are ordinary tokens."""
    batch = make_batch(
        [group([0, EOS], [[0, EOS, 0, EOS], [0]], [1, 0])], [np.array([1, -1], np.float32)],
        ref_logprobs=None, max_new_tokens=4,
    )  # fmt: skip
    assert batch.policy.mask.int().tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]]
    assert batch.policy.ref_logprobs is None


def test_an_empty_completion_is_a_row_without_weight():
    batch = make_batch(
        [group([7, 8], [[], [EOS]], [0, 1])], [np.array([-1, 1], np.float32)],
        ref_logprobs=None, max_new_tokens=4,
    )  # fmt: skip
    assert (batch.denominators.tokens, batch.denominators.sequences) == (1.0, 1.0)


def test_batching_reads_read_only_arrays_and_shares_no_memory_with_them():
    for g in GROUPS:
        for array in (g.rewards, *(r.completion_ids for r in g.rollouts)):
            array.setflags(write=False)
    advantages = sample_advantages(GROUPS, credit())
    batch = make_batch(GROUPS, advantages, ref_logprobs=None, max_new_tokens=4)
    batch.tokens.zero_()
    assert GROUPS[0].rollouts[0].completion_ids.tolist() == [4, 5, EOS]


@pytest.mark.parametrize(
    ("estimator", "std", "expected"),
    [
        ("grpo", "group", (1.6201816, -0.5400605)),
        ("dr_grpo", "group", (0.75, -0.25)),
        ("rloo", "none", (0.8571429, -0.2857143)),
        # Eleven scored samples; the squares of their centred rewards add up to 2 * 0.75² + 6 * 0.25² = 1.5.
        ("grpo", "batch", (0.75 / math.sqrt(0.15), -0.25 / math.sqrt(0.15))),
    ],
)
def test_advantages_are_computed_over_the_whole_step_group_by_group(estimator, std, expected):
    rewards = [1, 0, 0, 1, 0, 0, 0, 0], [0.7, 0.7], [math.nan, 1]
    groups = [group([1], [[EOS]] * len(values), values) for values in rewards]
    actual = sample_advantages(groups, credit(estimator, std=std))
    right, wrong = expected
    np.testing.assert_allclose(actual[0], [right, wrong, wrong, right, wrong, wrong, wrong, wrong], rtol=3e-6)
    assert [a.tolist() for a in actual[1:]] == [[0.0, 0.0], [0.0, 0.0]]
    assert all(a.dtype == np.float32 for a in actual)


def test_updates_hold_whole_groups_in_order_with_their_denominators():
    batch = made_groups.batch(groups=6, samples=3)
    parts = split_updates(batch, num_groups=6, num_updates=3)
    assert [len(p) for p in parts] == [6, 6, 6]
    for i, part in enumerate(parts):
        width = part.tokens.shape[1]
        rows = slice(6 * i, 6 * i + 6)
        assert width == int(batch.lengths[rows].max())
        assert torch.equal(part.tokens, batch.tokens[rows, :width])
        assert torch.equal(part.policy.advantages, batch.policy.advantages[rows, :width])
        assert part.denominators.tokens == float(batch.policy.mask[rows].sum())
        assert part.denominators.sequences == 6.0
    assert sum(p.denominators.tokens for p in parts) == batch.denominators.tokens
    assert split_updates(batch, num_groups=6, num_updates=1) == [batch]


@settings(max_examples=40)
@given(ranks=st.integers(1, 9), groups=st.integers(1, 6), seed=st.integers(0, 5))
def test_sharding_deals_every_row_once_balances_tokens_and_keeps_the_denominators(ranks, groups, seed):
    batch = made_groups.batch(groups=groups, samples=3, seed=seed, longest=40)
    parts = shard(batch, ranks)
    assert len(parts) == ranks
    rows = [tuple(t[:n].tolist()) for p in parts for t, n in zip(p.tokens, p.lengths, strict=True)]
    whole = [tuple(t[:n].tolist()) for t, n in zip(batch.tokens, batch.lengths, strict=True)]
    assert sorted(rows) == sorted(whole)
    load = [int(p.lengths.sum()) for p in parts]
    assert max(load) - min(load) <= int(batch.lengths.max())
    assert min(len(p) for p in parts) >= min(1, len(batch) // ranks)
    sizes = [(p.denominators.tokens, p.denominators.sequences) for p in (batch, *parts)]
    assert set(sizes) == {sizes[0]}
    again = shard(batch, ranks)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(parts, again, strict=True))


def test_a_rank_without_rows_holds_an_empty_batch():
    parts = shard(made_groups.batch(groups=1, samples=2), 3)
    assert [len(p) for p in parts] == [1, 1, 0]
    assert parts[2].tokens.shape == (0, 1) and micro_batches(parts[2].lengths.tolist(), 100) == []


def test_micro_batches_of_the_worked_example():
    assert micro_batches([3, 9, 4, 8], 18) == [[1, 3], [2, 0]]
    assert micro_batches([30, 9, 9], 18) == [[0], [1, 2]]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    parts = micro_batches(lengths, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[r] for r in part) <= budget
    # Longest first: no row of a later micro-batch is longer than one of an earlier one.
    flat = [lengths[r] for part in parts for r in part]
    assert flat == sorted(lengths, reverse=True)


def test_selecting_rows_leaves_the_batch_unchanged_and_records_are_frozen():
    batch = made_groups.batch()
    kept = batch.tokens.clone()
    part = batch.select([2, 0])
    part.tokens.fill_(0)
    assert torch.equal(batch.tokens, kept)
    assert part.lengths.tolist() == [int(batch.lengths[2]), int(batch.lengths[0])]
    with pytest.raises(AttributeError):
        batch.denominators.tokens = 3.0
