"""open-instruct#1627, "Fixes the weight sync": after a resume the engines sampled with the initial weights,
because the first sync was tied to step 1. trl#5312, "vLLM weights are not synchronized with
vllm_enable_sleep_mode=True", is the same without a resume: training continued, and nothing showed it.
"""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_dist.errors import Unhealthy
from grpo_dist.loop.progress import Progress
from grpo_dist.runs.checkpoint import ResumePoint
from grpo_dist.runs.session import _restore
from grpo_dist.types import Rollout
from tests.support import fakes
from tests.support.fakes import train

RESUMED_AT, INITIAL = 3, 0


class Engines(fakes.World):
    """Probes one engine, whose token log-probs are -1 - 0.1 times the version of its weights. ``stale``: the
    engine ignores new weights.
    """

    def __init__(self, stale=False):
        super().__init__(jitter=False)
        self.stale, self.engine_weights, self.serving = stale, INITIAL, object()
        self.policy_version = INITIAL
        self.notes = []

    def workers(self, reference=False):
        return dataclasses.replace(super().workers(reference), probe=Probes(self))

    def note(self, message):
        self.notes.append(message)

    async def load(self, directory):
        self.policy_version = RESUMED_AT
        self.events.append("load")

    async def update(self, batches, **how):
        self.policy_version += 1
        return await super().update(batches, **how)

    async def push(self, version):
        self.engine_weights = self.engine_weights if self.stale else version
        return await super().push(version)


class Probes:
    def __init__(self, world):
        self.world = world

    def engines(self):
        return {"rollout-0": self.world.serving}

    async def sample(self, engine, prompts, seeds, sampling):
        ids, value = np.array([4, 2], np.int32), np.float32(-1 - 0.1 * self.world.engine_weights)
        versions = np.full(2, self.world.version, np.int32)
        return [
            tuple(Rollout(p.uid, i, ids, np.full(2, value), "stop", "x", versions) for i in range(len(seeds)))
            for p in prompts
        ]

    async def logprobs(self, batch):
        value = np.full(2, -1 - 0.1 * self.world.policy_version, np.float32)
        return "float32", dict.fromkeys(batch.row_ids.tolist(), value)


def resume(world):
    point = ResumePoint(Path("run/checkpoints/step_000003"), Progress(RESUMED_AT))
    run = SimpleNamespace(config=fakes.config(), tracker=None)
    asyncio.run(_restore(run, point, world.workers()))
    return point


def test_the_bug_syncs_after_step_1_alone():
    """The sync runs ``if step == 1``, which a run that resumes at 3 never reaches."""
    synced = [step for step in range(RESUMED_AT + 1, 7) if step == 1]
    assert synced == []


def test_weights_are_sent_before_the_loop_begins_and_after_they_are_loaded():
    world = Engines()
    resume(world)
    assert world.events == ["load", "sync 3 with 0 in flight"]
    assert (world.engine_weights, world.version) == (RESUMED_AT, RESUMED_AT)


def test_a_resumed_run_trains_where_the_engine_has_the_weights():
    world = Engines()
    point = resume(world)
    train(world, fakes.config(steps=5), fakes.prompts(40), progress=point.progress)
    assert len(world.updates) == 2 and "at version 3" in world.notes[0]


@pytest.mark.parametrize("resumed", [True, False])
def test_an_engine_that_kept_other_weights_ends_the_run_before_they_move_anything(resumed):
    """Its label is right, its weights are wrong: only the log-probs of its samples show it."""
    world = Engines(stale=True)
    progress = resume(world).progress if resumed else Progress()
    world.engine_weights = world.engine_weights if resumed else 7
    with pytest.raises(Unhealthy, match="engine and trainer are not the same model"):
        train(world, fakes.config(steps=5), fakes.prompts(40), progress=progress)
    assert world.updates == []
