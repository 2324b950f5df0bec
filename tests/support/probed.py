"""Fake engines and a fake policy for the probe of the sync."""

import asyncio
import dataclasses

import numpy as np

from grpo_dist.types import Rollout
from tests.support import fakes

LOGPROB = -1.0


class Probed(fakes.World):
    """Fake engines to probe: the policy's log-probs are -1, an engine's are -1 plus its error.

    ``probed`` has (version, engine names) of every comparison, in order.
    """

    def __init__(self, engines=("rollout-0",), dtype="float32", **options):
        super().__init__(jitter=False, **options)
        self.serving = {name: object() for name in engines}
        self.error, self.dtype = dict.fromkeys(engines, 0.0), dtype
        self.asked: list[tuple[int, str]] = []
        self.rows: list[int] = []
        self.notes: list[str] = []
        self.claimed = None  # the version that samples of a probe are labelled with; None: the true one
        self.requests = []

    def workers(self, reference=False):
        return dataclasses.replace(super().workers(reference), probe=Probes(self))

    def note(self, message):
        self.notes.append(message)

    def name_of(self, engine):
        return next((name for name, own in self.serving.items() if own is engine), None)

    @property
    def probed(self):
        found: dict[int, list[str]] = {}
        for version, name in self.asked:
            found.setdefault(version, []).append(name)
        return found


class Probes:
    def __init__(self, world):
        self._world = world

    def engines(self, version):
        return dict(self._world.serving)

    async def sample(self, engine, prompts, seeds, sampling):
        world, name = self._world, self._world.name_of(engine)
        if name is None:
            return []
        version = world.version if world.claimed is None else world.claimed
        world.asked.append((world.version, name))
        world.requests.append((tuple(p.uid for p in prompts), tuple(seeds), sampling))
        await asyncio.sleep(0)
        return [
            tuple(
                Rollout(
                    prompt.uid, i, np.array([seed % 89 + 3, 2], np.int32),
                    np.full(2, LOGPROB + world.error[name], np.float32), "stop", "x",
                    np.full(2, version, np.int32),
                )
                for i, seed in enumerate(seeds)
            )
            for prompt in prompts
        ]  # fmt: skip

    async def logprobs(self, batch):
        self._world.rows.append(len(batch))
        lengths = batch.loss_mask.sum(dim=1).tolist()
        values = [np.full(n, LOGPROB, np.float32) for n in lengths]
        return self._world.dtype, dict(zip(batch.row_ids.tolist(), values, strict=True))
