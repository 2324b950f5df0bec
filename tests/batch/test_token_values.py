"""Per-token values of training are recorded with their sample."""

import asyncio
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from grpo_dist.algorithms.advantages import grpo
from grpo_dist.batch.rows import make_batch, split_updates
from grpo_dist.batch.token_values import by_sample, has_tokens, values_of_rows
from grpo_dist.driver import run
from grpo_dist.observe.samples import read_groups, write_groups
from tests.support import fakes, made_groups
from tests.support.made_groups import shard


@pytest.fixture
def groups():
    rng = np.random.default_rng(1)
    result = [made_groups.group(i, rng, samples=3) for i in range(4)]
    unscored = np.array([np.nan, 1.0, 0.0], np.float32)
    return [*result[:3], replace(result[3], rewards=unscored)]


def batch_of(groups, *, reference=True):
    """Return a batch; sample s of group g has advantage 10 g + s and reference log-prob -(10 g + s)."""
    advantages = [np.float32(10 * g) + np.arange(3, dtype=np.float32) for g in range(len(groups))]
    ref_logprobs = [
        np.full(len(r.completion_ids), -(10 * g + i), np.float32)
        for g, group in enumerate(groups)
        for i, r in enumerate(group.rollouts)
    ]
    return make_batch(groups, advantages, ref_logprobs=ref_logprobs if reference else None, max_new_tokens=12)


def test_values_return_to_their_samples_for_any_split_of_rows(groups):
    updates = split_updates(batch_of(groups), num_groups=4, num_updates=2)
    parts = [part for update in updates for part in shard(update, 2)]
    logprobs = {row: np.full(1, row, np.float32) for part in parts for row in part.row_ids.tolist()}
    by_id = by_sample(groups, values_of_rows(parts, tokens=True), logprobs)
    for g, group in enumerate(groups):
        for i, rollout in enumerate(group.rollouts):
            if np.isnan(group.rewards[i]):
                assert ("p3", i) not in by_id  # unscored, so not trained
                continue
            values = by_id[group.prompt.uid, i]
            np.testing.assert_array_equal(values.advantages, np.full(len(rollout.completion_ids), 10 * g + i))
            np.testing.assert_array_equal(values.ref_logprobs, -values.advantages)
            assert values.trainer_logprobs.tolist() == [3 * g + i]


def test_without_a_kl_term_and_an_update_only_advantages_are_recorded(groups):
    values = by_sample(groups, values_of_rows([batch_of(groups, reference=False)], tokens=True), {})
    assert all(v.ref_logprobs is None and v.trainer_logprobs is None for v in values.values())
    assert len(values) == 11


def test_a_table_with_token_values_reads_back_as_one_without(groups, tmp_path):
    logprobs = {0: np.array([-0.5], np.float32)}
    values = by_sample(groups, values_of_rows([batch_of(groups)], tokens=True), logprobs)
    write_groups(tmp_path / "with.parquet", groups, values)
    write_groups(tmp_path / "without.parquet", groups)
    rows = pq.read_table(tmp_path / "with.parquet").to_pylist()
    assert rows[0]["trainer_logprobs"] == [-0.5] and rows[1]["trainer_logprobs"] is None
    assert rows[4]["advantages"] == [11.0] * len(rows[4]["completion_ids"])
    assert rows[4]["advantage"] == 11.0
    assert rows[9]["advantages"] is None and rows[9]["advantage"] is None  # unscored
    assert "advantages" not in pq.read_schema(tmp_path / "without.parquet").names
    prompts = {group.prompt.uid: group.prompt for group in groups}
    again = read_groups(tmp_path / "with.parquet", prompts)
    assert [g.rollouts[2].text for g in again] == [g.rollouts[2].text for g in groups]
    np.testing.assert_array_equal(again[3].rewards, groups[3].rewards)


def test_the_loop_records_token_values_for_the_requested_steps():
    settings = fakes.config(steps=5, tracking={"token_values_every": 2})
    world = fakes.World()
    asyncio.run(run(settings, world.workers(), fakes.prompts(40), [], world, world))
    recorded = {name: values for name, values in world.values.items() if has_tokens(values)}
    assert set(recorded) == {"step_000002", "step_000004"}
    for name, values in recorded.items():
        rollouts = [r for group in world.sampled_groups[name] for r in group.rollouts]
        # The fake policy's values identify each row.
        trained = {
            row: values[r.prompt_uid, r.sample].trainer_logprobs[0]
            for row, r in enumerate(rollouts)
            if values[r.prompt_uid, r.sample].trainer_logprobs is not None
        }
        assert trained and all(row == value for row, value in trained.items())
    assert world.keeps_logprobs == [False, True, False, True, False]


def test_the_advantage_of_every_sample_is_recorded_at_every_step():
    world = fakes.World()
    settings = fakes.config(steps=3, tracking={"token_values_every": 0}, algorithm={"advantage": "grpo"})
    asyncio.run(run(settings, world.workers(), fakes.prompts(40), [], world, world))
    assert world.keeps_logprobs == [False] * 3
    for name, values in world.values.items():
        assert not has_tokens(values)
        for group in world.sampled_groups[name]:
            ids = torch.zeros(len(group.rewards), dtype=torch.long)
            expected = grpo(torch.from_numpy(group.rewards.copy()), ids)
            recorded = [values[group.prompt.uid, i].advantage for i in range(len(group.rewards))]
            np.testing.assert_allclose(recorded, expected, atol=1e-6)


def test_phases_of_a_step_are_recorded_in_order():
    world = fakes.World()
    asyncio.run(run(fakes.config(steps=2), world.workers(), fakes.prompts(40), [], world, world))
    assert world.phases == {step: ["sample", "stage", "update", "drain", "sync"] for step in (1, 2)}


def test_without_kept_samples_no_token_values_are_recorded():
    settings = fakes.config(steps=2, tracking={"token_values_every": 1, "samples": False})
    world = fakes.World()
    asyncio.run(run(settings, world.workers(), fakes.prompts(40), [], world, world))
    assert world.keeps_logprobs == [False] * 2
    assert set(world.values.values()) == {None}
