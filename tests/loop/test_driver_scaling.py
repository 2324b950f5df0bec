"""The driver's fast code equals straightforward code, and its work grows only with the samples."""

import asyncio
import copy
import math
import pickle
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_dist import driver
from grpo_dist.batch.rows import make_batch
from grpo_dist.config import TrackingConfig
from grpo_dist.observe import samples
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.observe.tracker import Tracker
from grpo_dist.types import Group, HeldRoutes, PackedSamples, Prompt, Rollout, SentRows, Task, Thought
from grpo_dist.workers import Workers
from tests.evidence.driver_scaling import Instant, NoCheckpoints, measure, scaling_config, scaling_prompts
from tests.support import made_groups
from tests.support.losses import check_equal
from tests.support.made_records import made_group, made_prompts, made_rollouts

pytestmark = pytest.mark.machine

ROOT = Path(__file__).resolve().parents[2]


def row_by_row(groups, advantages, ref_logprobs, mask_truncated):
    """Build the [B, T] tensors of a batch row by row."""
    samples = [(g, i, r) for g in groups for i, r in enumerate(g.rollouts)]
    rows = [[*g.prompt.token_ids.tolist(), *r.completion_ids.tolist()] for g, _, r in samples]
    shape = (len(rows), max(map(len, rows)))
    out = {"tokens": torch.zeros(shape, dtype=torch.long), "mask": torch.zeros(shape, dtype=torch.bool)}
    out |= {name: torch.zeros(shape) for name in ("advantages", "rollout_logprobs", "ref_logprobs")}
    flat = [a for group_advantages in advantages for a in group_advantages]
    for row, (group, i, sample) in enumerate(samples):
        completion = slice(len(group.prompt.token_ids), len(rows[row]))
        out["tokens"][row, : len(rows[row])] = torch.tensor(rows[row], dtype=torch.long)
        if math.isnan(group.rewards[i]) or (mask_truncated and sample.finish_reason == "length"):
            continue
        out["mask"][row, completion] = True
        out["advantages"][row, completion] = float(flat[row])
        out["rollout_logprobs"][row, completion] = torch.from_numpy(sample.logprobs)
        out["ref_logprobs"][row, completion] = torch.from_numpy(ref_logprobs[row])
    return out | {"lengths": torch.tensor([len(row) for row in rows])}


@st.composite
def any_groups(draw):
    """Prompts and completions of any length, also empty; some unscored, some truncated."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    groups = []
    for g in range(draw(st.integers(1, 5))):
        lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        rollouts = tuple(
            Rollout(
                f"p{g}", i, rng.integers(0, 99, n).astype(np.int32), -rng.random(n, dtype=np.float32),
                draw(st.sampled_from(["stop", "length"])), "x" * n, rng.integers(0, 3, n).astype(np.int32),
            )
            for i, n in enumerate(lengths)
        )  # fmt: skip
        prompt = Prompt(f"p{g}", rng.integers(1, 99, draw(st.integers(1, 5))).astype(np.int32), "1", "made")
        rewards = np.where(rng.random(len(lengths)) < 0.3, np.nan, rng.random(len(lengths)))
        rewards = rewards.astype(np.float32)
        outcomes = ("correct",) * len(lengths)
        groups.append(Group(prompt, rollouts, rewards, {"math": rewards}, outcomes, baseline_reward=0.5))
    return groups


def same_group(a, b):
    same = a.prompt.uid == b.prompt.uid and a.outcomes == b.outcomes and a.score_s == b.score_s
    same &= a.baseline_reward == b.baseline_reward and len(a.rollouts) == len(b.rollouts)
    same &= np.array_equal(a.rewards, b.rewards, equal_nan=True)
    for one, other in zip(a.rollouts, b.rollouts, strict=True):
        for f in fields(Rollout):
            a_value, b_value = getattr(one, f.name), getattr(other, f.name)
            if isinstance(a_value, np.ndarray):
                same &= a_value.dtype == b_value.dtype and np.array_equal(a_value, b_value)
            else:
                same &= a_value == b_value
    return same


@settings(max_examples=60)
@given(groups=any_groups(), mask_truncated=st.booleans())
def test_a_batch_equals_one_built_row_by_row_bit_for_bit(groups, mask_truncated):
    rng = np.random.default_rng(0)
    advantages = [rng.standard_normal(len(g.rollouts)).astype(np.float32) for g in groups]
    reference = [rng.random(len(r.completion_ids), dtype=np.float32) for g in groups for r in g.rollouts]
    batch = make_batch(
        groups, advantages, ref_logprobs=reference, max_new_tokens=9, mask_truncated=mask_truncated
    )
    for name, expected in row_by_row(groups, advantages, reference, mask_truncated).items():
        actual = getattr(batch if name in ("tokens", "lengths") else batch.policy, name)
        assert actual.dtype == expected.dtype and torch.equal(actual, expected), name
    assert batch.denominators.tokens == float(batch.policy.mask.sum())
    assert batch.denominators.sequences == float(batch.policy.mask.any(dim=1).sum())


@settings(max_examples=40)
@given(groups=any_groups())
def test_the_samples_of_many_groups_are_sent_in_one_piece_and_arrive_unchanged(groups):
    buffers = []
    packed = PackedSamples.from_groups([group.rollouts for group in groups])
    sent = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1  # all numbers of all samples
    back = pickle.loads(sent, buffers=[bytes(b) for b in buffers])
    for i, group in enumerate(groups):
        scores = pickle.loads(pickle.dumps(group.scores()))
        arrived = Group.from_scores(group.prompt, back.group(i), scores)
        assert same_group(arrived, group)
        for rollout in arrived.rollouts:  # keeping one group keeps no other alive
            assert not np.shares_memory(rollout.completion_ids, back.numbers)
            assert not rollout.logprobs.flags.writeable
        assert same_group(copy.deepcopy(group), group)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_a_prompt_arrives_unchanged(kind):
    task, thought = Task("python", {"a": 1}, ({"role": "user"},), batched=True), Thought(prompt="opens")
    teacher = {"t": np.array([4], np.int32)}
    for extras in ((), ({"level": 3}, thought, task, teacher)):
        prompt = Prompt("p", np.array([1, 2, 3], kind), "6", "made", "1+2+3", *extras)
        buffers = []
        sent = pickle.dumps(prompt, protocol=5, buffer_callback=buffers.append)
        back = pickle.loads(sent, buffers=[bytes(b) for b in buffers])
        assert back.token_ids.dtype == kind and back.token_ids.tolist() == [1, 2, 3]
        assert len(buffers) == (kind is np.int64) + len(prompt.teacher_ids)
        assert {k: v.tolist() for k, v in back.teacher_ids.items()} == ({"t": [4]} if extras else {})
        others = [f.name for f in fields(Prompt) if f.name not in ("token_ids", "teacher_ids")]
        assert [getattr(back, name) for name in others] == [getattr(prompt, name) for name in others]


def test_samples_with_fields_of_unequal_length_are_not_packed():
    rollout = made_rollouts("p", 1, np.random.default_rng(0))[0]
    short = Rollout("p", 0, rollout.completion_ids[1:], rollout.logprobs, "stop", "", rollout.policy_versions)
    with pytest.raises(AssertionError, match="differ in length"):
        PackedSamples.from_groups([[short]])
    assert PackedSamples.from_groups([[], [rollout]]).group(0) == ()


@pytest.mark.parametrize("rows", [[0, 2, 5], [], [3, 1]])
@pytest.mark.parametrize(
    "make",
    [made_groups.episode_batch, lambda: made_groups.mixed_batch(top_k=2), made_groups.demonstrated_batch],
)
def test_the_rows_of_a_rank_are_sent_without_their_padding_and_arrive_as_selected(make, rows):
    batch = make()
    routes = tuple(HeldRoutes(np.full((1, 1, 1), row)) for row in range(len(batch)))
    buffers = []
    sent = pickle.dumps(
        SentRows(replace(batch, routes=routes), rows), protocol=5, buffer_callback=buffers.append
    )
    arrived = pickle.loads(sent, buffers=[bytes(b) for b in buffers])
    check_equal(replace(arrived, routes=None), batch.select(rows))
    assert [r.experts.item() for r in arrived.routes] == rows
    tokens = int(batch.lengths[rows].sum())
    assert max(len(b.raw()) for b in buffers) <= max(4 * tokens * (2 if batch.teacher else 1), 8 * len(rows))
    arrived.tokens.zero_()  # fails in read-only memory


@settings(max_examples=20)
@given(groups=any_groups(), part_size=st.sampled_from([1, 20, 1 << 20]))
def test_a_table_of_samples_reads_back_unchanged(groups, part_size, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "t.parquet"
    with patch.object(samples, "_TOKENS_OF_PART", part_size):
        write_groups(path, groups)
    back = read_groups(path, {g.prompt.uid: g.prompt for g in groups})
    assert all(same_group(a, b) for a, b in zip(back, groups, strict=True))
    schema = pq.read_schema(path)
    assert schema.field("logprobs").type == pa.list_(pa.float32())
    assert schema.field("problem").type == pa.string()


def calls(samples, workers, tmp_path, turns=0, *, package_only=False, order="launched"):
    """Count Python and C function calls in all threads of the real loop with ``samples`` per step.
    ``package_only``: count only this package's functions, in the loop's thread. ``order``: `batch.order`.
    """
    quiet = TrackingConfig(console=False, tensorboard=False)  # TensorBoard's thread wakes by the clock
    config = scaling_config(samples, workers, order).model_copy(update={"steps": 2, "tracking": quiet})
    run_dir = tmp_path / f"{order}_{samples}_{workers}_{turns}"
    run_dir.mkdir()
    prompts = scaling_prompts(config)
    instant, count = Instant(config, prompts, turns), 0

    def count_call(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    def count_package_call(frame, event, argument):  # excludes the shape checks of tests
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(f"{ROOT / 'grpo_dist'}")

    if not package_only:
        threading.setprofile(count_call)
    sys.setprofile(count_package_call if package_only else count_call)
    try:
        with Tracker(config, run_dir) as tracker:
            handles = Workers(instant, instant, None, instant, instant)
            asyncio.run(driver.run(config, handles, prompts, [], tracker, NoCheckpoints()))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return count


@pytest.mark.slow
def test_the_drivers_work_grows_with_samples_and_not_with_workers(tmp_path):
    calls(128, 1, tmp_path)  # fills imports and caches
    few, twice, four = (calls(n, 1, tmp_path) for n in (512, 1024, 2048))
    assert (four - twice) / (twice - few) == pytest.approx(2.0, rel=0.1)
    assert calls(1024, 64, tmp_path) < 1.05 * twice


@pytest.mark.parametrize("order", ["launched", "completion"])
def test_a_sample_costs_the_loops_thread_few_calls(order, tmp_path):
    calls(128, 1, tmp_path, order=order)  # fills imports and caches
    few, more, many = (calls(n, 1, tmp_path, package_only=True, order=order) for n in (256, 1024, 2048))
    # It is 45 if metrics visit samples one by one, and grows with the step in completion order if each group
    # that is done or launched visits all groups in flight.
    assert (more - few) / (2 * 768) < 18 and (many - more) / (2 * 1024) < 18


@pytest.mark.slow
def test_a_turn_of_an_episode_costs_the_driver_few_calls(tmp_path):
    calls(128, 1, tmp_path, turns=2)  # fills imports and caches
    few, many = (calls(256, 1, tmp_path, turns=turns) for turns in (4, 12))
    assert (many - few) / (256 * 2 * 8) < 20  # two steps, 256 samples, 8 more turns


@pytest.mark.slow
def test_the_loop_runs_on_simulated_actors_behind_the_real_handles(ray_cluster):
    from tests.support.simulated_actors import ray_workers

    cost = measure(64, 3, ray_workers)
    assert (cost.samples, cost.workers) == (64, 3) and cost.total_us >= cost.loop_us > 0


def test_generated_groups_are_trained_on():
    prompt = made_prompts(1)[0]
    group = made_group(prompt, made_rollouts(prompt.uid, 8, np.random.default_rng(0)))
    assert set(group.rewards.tolist()) == {0.0, 1.0}
