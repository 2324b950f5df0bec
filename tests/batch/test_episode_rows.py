"""Episodes in a batch: only sampled tokens are trained, each of them once, and an episode is one sample
whatever its rows.
"""

import math
import pickle
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist.algorithms.aggregation import MODES
from grpo_dist.algorithms.token_advantages import sum_to_go
from grpo_dist.batch.credit_assignment import sample_advantages, token_advantages
from grpo_dist.batch.rows import make_batch, split_updates
from grpo_dist.batch.sharding import packed_micro_batches
from grpo_dist.batch.shared_prefixes import shared_prefixes
from grpo_dist.batch.token_values import by_sample, values_of_rows
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.policy.attention import block_spans
from grpo_dist.policy.loss import batch_loss
from grpo_dist.policy.packing import packed
from grpo_dist.types import FurtherRow, PackedSamples, Rollout
from tests.support import made_groups
from tests.support.losses import check_equal, credit, objective
from tests.support.made_groups import shard


def row_by_row(groups, advantages, reference, *, masked=()):
    """Build the rows that `make_batch` must, token by token."""
    out, seen, sequences = [], 0, 0
    for group, values in zip(groups, advantages, strict=True):
        for i, rollout in enumerate(group.rollouts):
            sampled = [t for row in rollout.rows for t in row.logprobs[row.sampled]]
            trained = math.isfinite(group.rewards[i]) and all(map(math.isfinite, sampled))
            trained = trained and rollout.finish_reason not in masked
            sequences += trained and bool(sampled)
            for row in rollout.rows:
                context = group.prompt.token_ids if row is rollout else row.context_ids
                line = [(int(t), False, 0.0, 0.0, 0.0) for t in context]
                for c, token in enumerate(row.completion_ids.tolist()):
                    if trained and row.sampled[c]:
                        line.append((token, True, values[i], row.logprobs[c], reference[seen][c]))
                    else:
                        line.append((token, False, 0.0, 0.0, 0.0))
                out.append(line)
                seen += 1
    return out, sequences


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_a_batch_of_episodes_equals_one_built_token_by_token(seed, data):
    rng = np.random.default_rng(seed)
    groups = made_groups.episode_groups(groups=3, samples=3, seed=seed)
    reason = data.draw(st.sampled_from(["stop", "length", "turns", "error"]))
    first = groups[0].rollouts
    rewards = groups[1].rewards.copy()
    rewards[0] = np.nan
    groups[0] = replace(groups[0], rollouts=(replace(first[0], finish_reason=reason), *first[1:]))
    groups[1] = replace(groups[1], rewards=rewards)
    advantages = [rng.standard_normal(3).astype(np.float32) for _ in groups]
    rows = [row for g in groups for r in g.rollouts for row in r.rows]
    reference = [rng.random(len(row.completion_ids), dtype=np.float32) for row in rows]
    batch = make_batch(
        groups, advantages, ref_logprobs=reference, max_new_tokens=9, mask_outcomes=("turns", "length")
    )
    expected, sequences = row_by_row(groups, advantages, reference, masked=("turns", "length", "error"))
    assert batch.row_ids.tolist() == list(range(len(expected))) == list(range(len(rows)))
    assert batch.lengths.tolist() == [len(line) for line in expected]
    stream = batch.policy
    tensors = (batch.tokens, stream.mask, stream.advantages, stream.rollout_logprobs, stream.ref_logprobs)
    for i, line in enumerate(expected):
        for tensor, values in zip(tensors, zip(*line, strict=True), strict=True):
            row = tensor[i]
            assert torch.equal(row[: len(line)], torch.tensor(np.array(values), dtype=row.dtype))
            assert not row[len(line) :].any()
    assert batch.denominators.tokens == sum(mask for line in expected for _, mask, *_ in line)
    assert batch.denominators.sequences == sequences


def test_an_all_true_mask_makes_the_batch_of_a_sample_without_an_environment():
    """It only leaves the fast path of a step."""
    plain = made_groups.group(0, np.random.default_rng(0))
    rollouts = tuple(replace(r, sampled=np.ones(len(r.completion_ids), bool)) for r in plain.rollouts)
    marked = replace(plain, rollouts=rollouts)
    one, other = (
        make_batch([g], [np.arange(4, dtype=np.float32)], ref_logprobs=None, max_new_tokens=9)
        for g in (plain, marked)
    )
    check_equal(one, other)
    assert one.policy.sequence_tokens is None


def test_every_sampled_token_is_trained_once_and_an_episode_counts_once():
    groups = made_groups.episode_groups(rewritten=0.9)
    batch = made_groups.episode_batch(rewritten=0.9)
    samples = [r for g in groups for r in g.rollouts]
    assert len(batch) == sum(len(r.rows) for r in samples) > len(samples)
    tokens = sum(len(r.sampled_ids) for r in samples)
    assert batch.denominators.tokens == tokens == int(batch.policy.mask.sum())
    assert batch.denominators.sequences == len(samples)
    assert batch.policy.sequence_tokens.tolist() == [len(r.sampled_ids) for r in samples for _ in r.rows]
    parts = split_updates(batch, num_groups=3, num_updates=3)
    assert [p.denominators.sequences for p in parts] == [4.0] * 3
    assert sum(p.denominators.tokens for p in parts) == batch.denominators.tokens
    assert [set(p.group_ids.tolist()) for p in parts] == [{0}, {1}, {2}]


def test_nan_log_probs_of_observed_tokens_are_ignored_and_of_sampled_tokens_leave_out_the_episode():
    groups = made_groups.episode_groups(groups=1, rewritten=0.9, seed=3)
    (group,) = groups
    several = next(i for i, r in enumerate(group.rollouts) if r.further_rows)
    lost = group.rollouts[several]
    last = lost.further_rows[-1]
    unknown = replace(last, logprobs=np.full_like(last.logprobs, np.nan))
    rollouts = list(group.rollouts)
    rollouts[several] = replace(lost, further_rows=(*lost.further_rows[:-1], unknown))
    batch = make_batch(
        [replace(group, rollouts=tuple(rollouts))], [np.ones(4, np.float32)],
        ref_logprobs=None, max_new_tokens=9,
    )  # fmt: skip
    owner = [i for i, r in enumerate(rollouts) for _ in r.rows]
    trained = {owner[row] for row in batch.policy.mask.any(dim=1).nonzero()[:, 0].tolist()}
    assert trained == set(range(4)) - {several} and batch.denominators.sequences == 3


@pytest.mark.parametrize("order", ["as made", "further rows first"])
def test_packed_rows_share_the_prompt_only_with_rows_that_begin_with_it(order):
    batch = made_groups.episode_batch(groups=2, rewritten=0.9, seed=1)
    further = batch.prompt_lengths == 0
    assert further.any() and len(set(batch.prompt_lengths[~further].tolist())) == 2
    if order != "as made":
        batch = batch.select(list(reversed(range(len(batch)))))
    layout = packed(batch, batch.wanted, block_spans)
    # The source of each wanted token: the stream, read along the positions of its row.
    stream, positions = layout.tokens[0], layout.positions[0]
    shared = [(int(g), int(n)) for g, n in zip(batch.group_ids, batch.prompt_lengths, strict=True) if n]
    saved = sum(n for _, n in shared) - sum(n for _, n in set(shared))
    assert int(positions.numel()) == int(batch.lengths.sum()) - saved
    rows, columns = batch.policy.mask.nonzero().T
    assert torch.equal(stream[layout.sources], batch.tokens[rows, columns - 1])
    assert torch.equal(positions[layout.sources], columns - 1)
    assert torch.equal(layout.targets, batch.tokens[rows, columns])


@settings(max_examples=30)
@given(seed=st.integers(0, 99), ranks=st.integers(1, 5), budget=st.integers(10, 200))
def test_sharding_and_micro_batches_hold_every_row_of_every_episode_once(seed, ranks, budget):
    batch = made_groups.episode_batch(seed=seed, rewritten=0.6)
    parts = shard(batch, ranks)
    assert sorted(row for part in parts for row in part.row_ids.tolist()) == list(range(len(batch)))
    for part in parts:
        plan = packed_micro_batches(part.lengths.tolist(), shared_prefixes(part), budget)
        assert sorted(row for rows in plan for row in rows) == list(range(len(part)))


def credited(groups, settings, reference=None):
    batch = make_batch(groups, sample_advantages(groups, settings), ref_logprobs=reference, max_new_tokens=8)
    return batch, token_advantages(batch, groups, settings)


def episode(rows, rewards=(), *, prompt=(7, 8)):
    """Return an episode of rows such as "aaooa": a is an action's token, o observed; a turn per run of a."""
    turns, parts = [], []
    for number, row in enumerate(rows):
        sampled = np.array([c == "a" for c in row])
        ends = [i + 1 for i, c in enumerate(row) if c == "a" and row[i + 1 : i + 2] != "a"]
        turns += [made_groups.Turn(number, end, "") for end in ends]
        parts.append((np.full(len(row), 5, np.int32), np.where(sampled, -1, 0).astype(np.float32),
                      np.where(sampled, 0, -1).astype(np.int32), sampled))  # fmt: skip
    turns = tuple(
        replace(turn, reward=reward)
        for turn, reward in zip(turns, rewards or [None] * len(turns), strict=True)
    )
    (ids, logprobs, versions, sampled), *further = parts
    context = np.array([*prompt, 9], np.int32)
    return Rollout("p", 0, ids, logprobs, "stop", "", versions, sampled, turns,
                   tuple(FurtherRow(context, *part) for part in further))  # fmt: skip


def group_of(rewards, *episodes):
    group = made_groups.group_of(rewards, [1] * len(episodes))
    rollouts = tuple(replace(e, sample=i) for i, e in enumerate(episodes))
    prompt = replace(group.prompt, token_ids=np.array([7, 8], np.int32))
    return replace(group, prompt=prompt, rollouts=rollouts)


def test_an_observation_does_not_cut_the_reward_to_go():
    """verl#6376: an observation between two actions took the reward from the first action. With a discount of
    0.5 per turn the returns are 0.5, (observed) and 1.
    """
    assert sum_to_go(torch.tensor([[0.0, 0, 1]])).tolist() == [[1, 1, 1]]
    group = group_of([1, 0], episode(["aoa"]), episode(["aoa"]))
    how = credit("turn", std="none", discount=0.5)
    batch, got = credited([group], how)
    # Minus the means of the turns, 0.25 and 0.5.
    assert got.policy.advantages[0].tolist() == [0, 0, 0.25, 0, 0.5]
    assert got.policy.advantages[1].tolist() == [0, 0, -0.25, 0, -0.5]
    assert batch.policy.mask[0].tolist() == [False, False, True, False, True]


def test_kl_in_the_reward_counts_only_the_sampled_tokens_of_all_rows():
    """k1 is 0.5 per sampled token; values at observed tokens do not count."""
    group = group_of([0, 0], episode(["aooa", "aoa"]), episode(["a"]))
    reference = [np.array([-1.5, 9, np.nan, -1.5], np.float32), np.full(3, -1.5, np.float32),
                 np.full(1, -1.0, np.float32)]  # fmt: skip
    how = credit(std="none", kl_coef=1.0, kl={"estimator": "k1"})
    _, got = credited([group], how, reference)
    assert got.policy.advantages.tolist() == [[0, 0, -2.0, 0, 0, -1.5], [0, 0, 0, -1.0, 0, -0.5], [0] * 6]


def test_process_takes_the_rewards_of_turns_where_no_model_scores_steps():
    """Three turns have rewards 1, 0, 1, one has none; deviation 1/sqrt(3), as for step scores of a model."""
    group = group_of([1, 0], episode(["aaoa", "a"], (1.0, None, 0.0)), episode(["a"], (1.0,)))
    _, got = credited([group], credit("process", eps=1e-12))
    unit = math.sqrt(1 / 3)
    a, b = (1 / 3) / unit, (-2 / 3) / unit
    torch.testing.assert_close(got.policy.advantages[0], torch.tensor([0, 0, a + b, a + b, 0, b]))
    torch.testing.assert_close(got.policy.advantages[1], torch.tensor([0, 0, 0, b, 0, 0]))
    torch.testing.assert_close(got.policy.advantages[2], torch.tensor([0, 0, a, 0, 0, 0]))


def test_steps_stay_with_their_sample_after_a_sample_of_several_rows():
    """Steps 0 and 1 of two samples; the first has a further row, which gets nothing."""
    group = group_of([0, 1], episode(["aaa", "aaa"]), episode(["aaa"]))
    group = replace(
        group,
        step_rewards=(np.array([0], np.float32), np.array([1], np.float32)),
        step_ends=(np.array([2], np.int32), np.array([2], np.int32)),
    )
    _, got = credited([group], credit("process", std="none"))
    assert got.policy.advantages.tolist() == [[0, 0, -0.5, -0.5, -0.5, 0], [0] * 6, [0, 0, 0.5, 0.5, 0.5, 0]]


def test_an_episode_without_a_reward_is_in_no_statistic_of_turns():
    scored = group_of([1, 0], episode(["aoa"], (1.0, 0.0)), episode(["aoa"], (0.0, 0.0)))
    lost = group_of([1, 0, math.nan], *scored.rollouts, episode(["aoa"], (9.0, 9.0)))
    for estimator in ("turn", "process"):
        how = credit(estimator)
        _, two = credited([scored], how)
        _, three = credited([lost], how)
        torch.testing.assert_close(three.policy.advantages[:2], two.policy.advantages)
        assert two.policy.advantages.any()
        assert not three.policy.advantages[2].any() and not three.policy.mask[2].any()


def test_opo_weighs_with_the_tokens_that_were_sampled():
    group = group_of([1, 0], episode(["aaooooa"]), episode(["a"]))
    got = sample_advantages([group], credit("opo"))
    np.testing.assert_allclose(got[0], [0.25, -0.75])


def test_token_values_return_to_the_rows_of_their_episodes(tmp_path):
    groups = made_groups.episode_groups(rewritten=0.6, seed=4)
    batch = made_groups.episode_batch(rewritten=0.6, seed=4)
    rows = [row for g in groups for r in g.rollouts for row in r.rows]
    parts = [p for update in split_updates(batch, num_groups=3, num_updates=3) for p in shard(update, 2)]
    logprobs = {i: np.full(int(row.sampled.sum()), -i, np.float32) for i, row in enumerate(rows)}
    token_values = by_sample(groups, values_of_rows(parts, tokens=True), logprobs)
    number = 0
    for group in groups:
        for rollout in group.rollouts:
            values = token_values[group.prompt.uid, rollout.sample]
            by_row = [values, *values.further_rows]
            assert len(by_row) == len(rollout.rows)
            for row, recorded in zip(rollout.rows, by_row, strict=True):
                at = slice(batch.lengths[number] - len(row.completion_ids), batch.lengths[number])
                for name in ("advantages", "ref_logprobs"):
                    expected = getattr(batch.policy, name)[number, at]
                    np.testing.assert_array_equal(getattr(recorded, name), expected)
                np.testing.assert_array_equal(recorded.trainer_logprobs, np.where(row.sampled, -number, 0))
                number += 1
            trained = batch.policy.advantages[number - 1][batch.policy.mask[number - 1]]  # all equal
            assert values.advantage == pytest.approx(float(trained[0]), rel=1e-6)
    write_groups(tmp_path / "t.parquet", groups, token_values)
    table = pq.read_table(tmp_path / "t.parquet").to_pylist()
    several = next(i for i, r in enumerate(r for g in groups for r in g.rollouts) if r.further_rows)
    assert table[several]["further_rows"][0]["advantages"] is not None


def same(a, b):
    """Compare two records bit for bit."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return (a is b) or a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@settings(max_examples=30)
@given(seed=st.integers(0, 999))
def test_episodes_are_sent_and_kept_bit_for_bit(seed, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "groups.parquet"
    groups = made_groups.episode_groups(seed=seed)
    turn = replace(groups[0].rollouts[0].turns[0], reward=math.nan, observation="\u2028é\n", thought="opens")
    first = groups[0].rollouts[0]
    odd = replace(first, turns=(turn, *first.turns[1:]))
    groups[0] = replace(groups[0], rollouts=(odd, *groups[0].rollouts[1:]))
    groups.append(made_groups.group(7, np.random.default_rng(seed)))  # without an environment
    sent = pickle.loads(pickle.dumps(PackedSamples.from_groups([group.rollouts for group in groups])))
    write_groups(path, groups)
    kept = read_groups(path, {g.prompt.uid: g.prompt for g in groups})
    for i, (group, read) in enumerate(zip(groups, kept, strict=True)):
        assert same(group.rollouts, sent.group(i)) and same(group.rollouts, read.rollouts)


def test_a_table_of_episodes_from_before_thoughts_were_recorded_is_read(tmp_path):
    path, group = tmp_path / "t.parquet", made_groups.episode_groups(seed=0)[0]
    write_groups(path, [group])
    table = pq.read_table(path)
    turns = [
        [{name: value for name, value in turn.items() if name != "thought"} for turn in row]
        for row in table["turns"].to_pylist()
    ]
    index = table.schema.get_field_index("turns")
    pq.write_table(table.set_column(index, "turns", pa.array(turns)), path)
    (read,) = read_groups(path, {group.prompt.uid: group.prompt})
    assert same(read.rollouts, group.rollouts)


def test_a_table_without_episodes_has_no_columns_for_them(tmp_path):
    group = made_groups.group(0, np.random.default_rng(0))
    write_groups(tmp_path / "t.parquet", [group])
    assert not {"sampled", "turns", "further_rows"} & set(pq.read_schema(tmp_path / "t.parquet").names)
    (read,) = read_groups(tmp_path / "t.parquet", {group.prompt.uid: group.prompt})
    assert same(read.rollouts, group.rollouts) and read.rollouts[0].sampled is None


def test_reading_a_table_makes_no_object_per_token(tmp_path):
    """A checkpoint may hold gigabytes of samples, and the loop waits for them."""
    group, tokens = made_groups.group(0, np.random.default_rng(0)), 100_000
    ids = np.arange(tokens, dtype=np.int32)
    first = replace(
        group.rollouts[0], completion_ids=ids, logprobs=ids.astype(np.float32), policy_versions=ids
    )
    group = replace(group, rollouts=(first, *group.rollouts[1:]))
    write_groups(tmp_path / "t.parquet", [group])
    peaks = []
    for _ in range(2):  # the first time imports modules
        tracemalloc.start()
        (read,) = read_groups(tmp_path / "t.parquet", {group.prompt.uid: group.prompt})
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert 12 * tokens < peaks[1] < 24 * tokens and same(read.rollouts, group.rollouts)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_one_episode_weigh_as_if_they_were_one_row(mode):
    """Two actions in one row or in two give every sampled token the same weight."""

    def weights(first):
        group = group_of([1, 0], first, episode(["aaaa"]))
        batch = make_batch([group], [np.array([1, -1], np.float32)], ref_logprobs=None, max_new_tokens=8)
        logprobs = torch.zeros(batch.tokens.shape, requires_grad=True)
        loss, _ = batch_loss(logprobs, batch, objective(aggregation=mode))
        loss.backward()
        return logprobs.grad[batch.policy.mask]

    torch.testing.assert_close(weights(episode(["aaa", "a"])), weights(episode(["aaaooa"])))
