"""The next batch is staged while the optimiser runs, without changing any number."""

import asyncio
import dataclasses
import gc
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_dist.driver import run
from grpo_dist.loop import staging, updates
from grpo_dist.loop.updates import score_norms_of
from tests.support import fakes, made_groups
from tests.support.losses import check_equal
from tests.support.patience import HANG_S

STEERED = {"kl": {"coef": 0.1, "target": 0.5, "gain": 1.0}}


class Slow(fakes.World):
    """Its update is long enough for staging ahead to begin; records the order of events."""

    def stage(self, batches, **how):
        self.events.append("stage")
        return super().stage(batches, **how)

    async def update(self, batches, *, kl_coef, bounds):
        await super().update(batches, kl_coef=kl_coef, bounds=bounds)
        await self.while_it_updates()
        self.events.append("updated")
        return {"loss/policy": 0.0, "ref/kl": 5.0}

    async def while_it_updates(self):
        await asyncio.sleep(0.1)

    async def refresh(self):
        self.events.append("refresh")


class Ahead(Slow):
    """Its update waits until the next batch is staged, except in step ``last``."""

    def __init__(self, last):
        super().__init__()
        self._last = last

    async def while_it_updates(self):
        async with asyncio.timeout(HANG_S):
            while len(self.updates) < self._last and self.events.count("stage") <= len(self.updates):
                await asyncio.sleep(0.01)


def train(config, world, *, refresh=False):
    workers = world.workers(reference=config.needs_reference)
    if refresh:
        workers = dataclasses.replace(workers, reference_sync=world)
    asyncio.run(run(config, workers, fakes.prompts(40), [], world, world))
    return [e for e in world.events if e in ("stage", "updated", "refresh")]


def test_the_next_batch_is_staged_while_the_optimiser_runs():
    events = train(fakes.config(steps=3, max_staleness=1), Ahead(last=3))
    assert events == ["stage", "stage", "updated", "stage", "updated", "updated"]


def test_what_visits_every_sample_of_a_step_leaves_the_loops_thread_free(monkeypatch):
    """That thread launches and receives groups; everything waits for it."""
    threads = {}

    def record_thread(name, function, *arguments, **settings):
        threads.setdefault(name, set()).add(threading.get_ident())
        return function(*arguments, **settings)

    in_staging = ("rollout_metrics", "sampling_cost", "needed_tokens", "by_sample")
    for module, name in ((updates, "make_updates"), *((staging, name) for name in in_staging)):
        monkeypatch.setattr(module, name, partial(record_thread, name, getattr(module, name)))
    train(fakes.config(steps=2, tracking={"samples": True}), Slow())
    assert len(threads) == 5 and all(threading.get_ident() not in idents for idents in threads.values())


@pytest.mark.parametrize(
    ("changes", "refresh"),
    [
        ({"algorithm": {"kl": STEERED["kl"] | {"in_reward": True}}}, False),  # part of the advantages
        ({"algorithm": {"advantage": "otb"}}, False),  # reads the policy
        ({"algorithm": {"kl": {"coef": 0.1}}, "reference": {"refresh_every": 1}}, True),
    ],
)
def test_a_batch_that_the_update_still_changes_is_staged_after_it(changes, refresh):
    events = train(fakes.config(steps=2, max_staleness=1, **changes), Slow(), refresh=refresh)
    assert [e for e in events if e != "refresh"] == ["stage", "updated"] * 2


def test_the_token_baseline_reads_the_policy_once_before_each_update():
    """Score norms of 0.5 for every token: both samples weigh the same, so the baseline is their mean."""
    world = Slow()
    settings = fakes.config(steps=2, max_staleness=1, algorithm={"advantage": "otb", "skip_idle_rows": False})
    train(settings, world)
    norms = [e for e in world.events if e.startswith(("score norms", "update at"))]
    assert norms == [f"{event} at version {i}" for i in range(2) for event in ("score norms", "update")]
    for number, (batch,) in enumerate(world.updates):
        rewards = np.stack([g.rewards for g in world.sampled_groups[f"step_{number + 1:06d}"]])
        expected = torch.from_numpy(rewards - rewards.mean(axis=1, keepdims=True)).flatten()[:, None]
        torch.testing.assert_close(batch.policy.advantages, torch.where(batch.policy.mask, expected, 0.0))


def test_a_sample_without_a_reward_has_score_norms_for_the_reward_that_a_shuffle_may_give_it():
    (group, *others), world = made_groups.episode_groups(), fakes.World()
    unscored = np.full_like(group.rewards, np.nan)
    norms = [
        asyncio.run(score_norms_of(world, [dataclasses.replace(group, rewards=rewards), *others]))
        for rewards in (group.rewards, unscored)
    ]
    assert norms[0].any(dim=1).all() and torch.equal(*norms)


def test_a_steered_kl_weight_in_the_loss_does_not_delay_staging():
    world = Ahead(last=3)
    events = train(fakes.config(steps=3, max_staleness=1, algorithm=STEERED), world)
    assert events[:3] == ["stage", "stage", "updated"]
    assert world.kl_coefs == pytest.approx([0.1, 0.12, 0.144])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": STEERED},
        {"algorithm": {"kl": {"coef": 0.1, "in_reward": True}, "advantage": "reinforce_pp"}},
        {"algorithm": {"kl": STEERED["kl"] | {"in_reward": True}}},
        {"rewards": {"shuffle": True}},
        {"dynamic_sampling": {"enabled": True}},
        {"batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": 2}},
    ],
)
def test_staging_ahead_changes_no_number(monkeypatch, changes):
    config = fakes.config(steps=4, max_staleness=2, **changes)
    ahead, later = Slow(), Slow()
    train(config, ahead)
    monkeypatch.setattr(staging.Staging, "begin", lambda self, step, sampling: None)
    train(config, later)
    for one, other in zip(ahead.updates, later.updates, strict=True):
        for a, b in zip(one, other, strict=True):
            check_equal(a, b)
    assert ahead.kl_coefs == later.kl_coefs


def test_the_kl_weight_reaches_every_update_of_a_rank():
    from actors.workers.policy import PolicyWorker, RankUpdates

    worker = PolicyWorker()
    worker._trainer = SimpleNamespace(update=lambda batches, bounds, kl_coef, **_: kl_coef)
    rank_updates = RankUpdates([made_groups.batch(), made_groups.batch()], keep_logprobs=False)
    assert worker.update(rank_updates, 0.3, ()) == 0.3


def test_a_failure_while_staging_ahead_ends_the_run_with_its_own_error():
    class Broken(Slow):
        def stage(self, batches, **how):
            if "stage" in self.events:
                raise RuntimeError("object store full")
            return super().stage(batches, **how)

    with pytest.raises(RuntimeError, match="object store full"):
        train(fakes.config(steps=3, max_staleness=1), Broken())


def test_a_failure_of_sampling_is_raised_once_and_unchanged(caplog):
    gc.collect()  # garbage of other tests
    caplog.clear()
    world = Slow(fail_on="p3")
    with pytest.raises(RuntimeError, match="engine died on p3"):
        train(fakes.config(steps=10, max_staleness=1), world)
    gc.collect()
    messages = [record.getMessage() for record in caplog.records]
    assert not [text for text in messages if "never retrieved" in text and "p3" in text]
