"""Checkpoints of a run that only saves."""

import asyncio
from pathlib import Path

import numpy as np

from grpo_dist.algorithms.moments import Moments
from grpo_dist.data.order import OrderState
from grpo_dist.health import HealthState
from grpo_dist.loop.progress import PipelineState, Progress
from grpo_dist.runs.checkpoint import Checkpoints
from grpo_dist.types import Group, Rollout
from tests.support import fakes

PROMPTS = fakes.prompts(4)
MOMENTS = Moments(12, 0.1, 1 / 3)
HEALTH = HealthState(0.75, (1.5, 2.5), 1, (2, 7))
ORDER = OrderState(17, (3, 9), {"p1": (0.5, 4.0)})


class Disk:
    """The policy of a run that only saves; ``fails`` makes it die midway."""

    def __init__(self, fails=False, writing=None):
        self.policy, self.reference, self._fails = self, None, fails
        self._writing = writing  # an event to wait for before writing files

    async def save(self, directory: Path, *, blocking: bool):
        directory.mkdir()
        self._directory = directory
        if blocking:
            await self.saved()

    async def saved(self):
        if self._writing is not None:
            await self._writing.wait()
        (self._directory / "weights").write_text("1")
        if self._fails:
            raise RuntimeError("disk full")


def group(prompt):
    rollout = Rollout(
        prompt_uid=prompt.uid, sample=0, completion_ids=np.array([4, 2], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32), finish_reason="stop", text="x",
        policy_versions=np.array([3, 3], np.int32),
    )  # fmt: skip
    rewards = np.array([1.0], np.float32)
    return Group(prompt, (rollout,), rewards, {"math": rewards}, ("correct",), baseline_reward=0.5)


def save(directory, step, *, config=None, ahead=None, prompts=PROMPTS, **disk):
    checkpoints = Checkpoints(directory, config or fakes.config(), prompts)
    partial = {4: [group(PROMPTS[0])]} if ahead else {}
    pipeline = PipelineState(ahead or {}, partial, {3: [1, 0], 12: [2]}, ORDER)
    progress = Progress(step, pipeline, HEALTH, 0.25, False, MOMENTS)
    asyncio.run(whole(checkpoints, step, Disk(**disk), progress))


async def whole(checkpoints, step, disk, progress):
    await checkpoints.save(step, disk, progress)
    await checkpoints.settle()
