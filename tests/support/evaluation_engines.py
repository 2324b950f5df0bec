"""Fake engines of evaluation, and workers that have them."""

import asyncio
import dataclasses
import shutil

from grpo_dist.evaluation.sampling import EvalSet
from tests.support import fakes

HELD = [EvalSet("held", [dataclasses.replace(p, uid=f"held {p.uid}") for p in fakes.prompts(3)])]
EVERY_2 = {"before": True, "after": False, "every": 2, "samples_per_prompt": 2, "k": [1]}


class Engines:
    """Engines that sample under the version of a snapshot; ``rollouts`` and ``rewards`` of an evaluation."""

    def __init__(self, world):
        self.world, self.rollouts, self.rewards = world, self, world
        self.version, self.copied, self.sampled = None, {}, []
        self.gate, self.failure = asyncio.Event(), None
        self.gate.set()

    async def snapshot(self, directory, version):
        assert version == self.world.version == len(self.world.updates)
        self.copied[directory] = version

    async def written(self):
        for directory, version in self.copied.items():
            (directory / "version").write_text(str(version))
        self.copied = {}

    async def load(self, directory):
        self.version = int((directory / "version").read_text())
        return True

    def has_snapshot(self, directory):
        return (directory / "version").exists()

    async def discard(self, directory):
        shutil.rmtree(directory)

    async def sample(self, prompt, *, seeds, sampling):
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.sampled.append((self.version, len(self.world.updates)))
        return await self.world.sample(prompt, seeds=seeds, sampling=sampling)


class OwnWorld(fakes.World):
    """Workers with engines of evaluation, and a run directory."""

    def __init__(self, directory):
        super().__init__(jitter=False)
        self.directory, self.notes, self.last = directory, [], None
        self.engines = Engines(self)

    def workers(self, reference=False):
        return dataclasses.replace(super().workers(reference), evaluation=self.engines)

    def note(self, message):
        self.notes.append(message)

    async def push(self, version):
        assert version == len(self.updates)
        return await super().push(version)

    @property
    def kept(self):
        return sorted(path.name for path in self.directory.glob("evaluation/*"))
