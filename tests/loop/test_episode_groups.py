"""Episodes in the real loop on fake workers: each row is trained, recorded and counted with its sample."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from grpo_dist.batch.token_values import values_of_rows
from grpo_dist.driver import run
from grpo_dist.loop.groups import ScoredGroup
from grpo_dist.types import TeacherLogprobs
from tests.support import fakes, made_groups
from tests.support.tiers import slow_after

ENVIRONMENT = {"train": [{"path": "demo:add3"}], "environment": "calculator"}


def config(**changes):
    batch = {"prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 2}
    return fakes.config(data=ENVIRONMENT, batch=batch, steps=3, **changes)


class Episodes(fakes.World):
    """Samples episodes of one to four turns; the policy's log-probs encode the row number."""

    async def sample(self, prompt, *, seeds, sampling):
        rng = np.random.default_rng(seeds[0])
        group = made_groups.episode_group(0, rng, samples=len(seeds), rewritten=0.5)
        return tuple(replace(r, prompt_uid=prompt.uid) for r in group.rollouts)

    async def score(self, prompt, rollouts):
        rewards = np.array([float(r.completion_ids[0] % 2) for r in rollouts], np.float32)
        return made_groups.Group(prompt, rollouts, rewards, {"fake": rewards}, ("correct",) * len(rollouts))

    async def logprobs(self, prompt, rollouts, top_k=0):
        rows = [row for r in rollouts for row in r.rows]
        return [TeacherLogprobs(np.full(len(row.completion_ids), -1.0, np.float32)) for row in rows]

    async def token_logprobs(self):
        logprobs = {}
        for batch in self.updates[-1]:
            for row, mask in zip(batch.row_ids.tolist(), batch.policy.mask, strict=True):
                logprobs[row] = np.full(int(mask.sum()), -1.0 - row, np.float32)
        return logprobs


@pytest.mark.parametrize("advantage", slow_after(["grpo", "turn", "process", "opo", "otb"], 3))
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_every_row_is_trained_and_recorded_with_its_sample(advantage, kl):
    algorithm = {"advantage": advantage, "kl": {"coef": kl}, "skip_idle_rows": False}
    settings = config(algorithm=algorithm, tracking={"token_values_every": 1})
    world = Episodes()
    asyncio.run(run(settings, world.workers(reference=kl > 0), fakes.prompts(40), [], world, world))
    for step, updates in enumerate(world.updates, 1):
        name = f"step_{step:06d}"
        groups, step_values = world.sampled_groups[name], world.values[name]
        rollouts = [r for g in groups for r in g.rollouts]
        rows = [row for r in rollouts for row in r.rows]
        assert sorted(row for u in updates for row in u.row_ids.tolist()) == list(range(len(rows)))
        assert len(rows) > len(rollouts) == 16
        assert [u.denominators.sequences for u in updates] == [8.0, 8.0]
        assert sum(u.denominators.tokens for u in updates) == sum(len(r.sampled_ids) for r in rollouts)
        number = 0
        for rollout in rollouts:
            first = step_values[rollout.prompt_uid, rollout.sample]
            for row, values in zip(rollout.rows, [first, *first.further_rows], strict=True):
                expected = np.where(row.sampled, -1.0 - number, 0.0)
                np.testing.assert_array_equal(values.trainer_logprobs, expected)
                assert len(values.advantages) == len(row.completion_ids)
                assert (values.ref_logprobs is None) == (kl == 0)
                number += 1
        uids = [uid for uids in world.ledger_entries[step].values() for uid in uids]
        assert sorted(uids) == sorted(g.prompt.uid for g in groups)
        logged = world.logged[step]
        assert logged["train/rows"] == len(rows) and logged["episode/rows"] == len(rows) / 16
        assert logged["rollout/staleness_max"] == 0.0  # a version of -1 would make it ``step``


def test_a_group_has_a_signal_where_only_a_further_row_has_one():
    """Two episodes differ only in their second turn, which has its own row."""
    episodes = made_groups.episode_group(0, np.random.default_rng(3), samples=2, rewritten=1.0)
    multi_turn = [r for r in episodes.rollouts if len(r.turns) > 1]
    first, other = multi_turn[0], replace(multi_turn[0], sample=1)
    turns = tuple(replace(t, reward=float(i == 1)) for i, t in enumerate(first.turns))
    group = replace(episodes, rollouts=(replace(first, turns=turns), replace(
        other, turns=tuple(replace(t, reward=0.0) for t in other.turns))), rewards=np.zeros(2, np.float32),
    )  # fmt: skip
    settings = fakes.config(
        data=ENVIRONMENT, batch={"prompts_per_step": 1, "samples_per_prompt": 2},
        algorithm={"advantage": {"name": "turn", "discount": 0.0}},
    )  # fmt: skip
    (batch,) = fakes.make_batches(settings, [ScoredGroup(group, [])], 0, kl_coef=0.0)
    rows = len(first.rows)
    assert batch.row_ids.tolist() == [1, rows + 1] and batch.group_ids.tolist() == [0, 0]
    assert batch.denominators.sequences == 2 and batch.denominators.tokens == 2 * len(first.sampled_ids)
    assert set(values_of_rows([batch], tokens=False)) == {1, rows + 1}


@pytest.mark.parametrize("masked", ["turns", "tool_limit", "length"])
def test_a_masked_end_is_not_trained_and_its_reward_counts(masked):
    episodes = made_groups.episode_group(0, np.random.default_rng(0), samples=3, rewards=[0, 0, 1])
    masked_episode = replace(episodes.rollouts[0], finish_reason=masked)
    group = replace(episodes, rollouts=(masked_episode, *episodes.rollouts[1:]))
    settings = fakes.config(
        data=ENVIRONMENT, batch={"prompts_per_step": 1, "samples_per_prompt": 3},
        algorithm={"advantage": {"std": "none"}, "skip_idle_rows": False},
        environments={"mask_outcomes": [masked]},
    )  # fmt: skip
    (batch,) = fakes.make_batches(settings, [ScoredGroup(group, [])], 0, kl_coef=0.0)
    assert not batch.policy.mask[: len(masked_episode.rows)].any() and batch.denominators.sequences == 2
    assert batch.policy.advantages[len(masked_episode.rows)].abs().max() == pytest.approx(1 / 3)
