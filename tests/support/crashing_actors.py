"""Actors that replace real ones until they die or hang. They import little, so that they start fast."""

import asyncio
import os
import signal
import time
from dataclasses import replace

from actors.lifecycle.calls import Health, Probeable
from actors.workers.exchange import from_arguments
from tests.support.simulated_actors import SimulatedReward, SimulatedRollout


class Engine(SimulatedRollout):
    """Answers after a while with its process; hangs or fails in a step on request."""

    def __init__(self, spec):
        super().__init__(spec)
        self._stuck = self._failed = False

    async def health(self):
        self._check()
        return Health(1.0 if self._stuck else None)

    def _check(self):
        if self._failed:
            raise RuntimeError("the engine has failed: out of memory")

    async def fail(self):
        self._failed = True

    async def stick(self):
        self._stuck = True

    async def sample(self, prompt, seeds, sampling):
        rollouts = await super().sample(prompt, seeds, sampling)
        await asyncio.sleep(0.05)
        while self._stuck:
            await asyncio.sleep(0.05)
        self._check()
        return tuple(
            replace(rollouts[i], prompt_uid=prompt.uid, sample=seed, text=str(os.getpid()))
            for i, seed in enumerate(seeds)
        )

    async def process(self):
        return os.getpid()


class Busy(Probeable):
    def work(self, seconds):
        time.sleep(seconds)
        return os.getpid()

    def ready(self):
        """Up."""


class Grader(SimulatedReward, Probeable):
    """A reward worker: some prompts kill every worker that scores them, others only the first."""

    def score(self, prompt, rollouts, modelled):
        mark = prompt.columns.get("mark")
        if prompt.uid == "poison" or (mark and not os.path.exists(mark)):
            if mark:
                open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score(prompt, rollouts, modelled)


class Frozen(Probeable):
    """Replaces a reference worker."""

    def __init__(self, **settings):
        """Take the settings of the real worker."""

    def ready(self):
        """Up."""

    def logprobs(self, prompt, samples, top_k):
        return [len(rollout) for rollout in from_arguments(samples, ())]
