"""Failures of engines and policy ranks in a simulated run, and its checkpoints.

engine fails    its groups go to other engines; after `restart_s` it serves again
rank fails      StateLost from the policy's current or next call; then all ranks restart from the last
                checkpoint, and once more if another one fails meanwhile
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_dist.errors import StateLost
from grpo_dist.loop.progress import Progress
from grpo_dist.runs.resume import ResumePoint
from grpo_dist.runtime.load_balancer import LoadBalancer
from grpo_dist.tools.plan.engines import Engine
from grpo_dist.tools.plan.rank_failures import RESTART_S
from grpo_dist.tools.plan.trace import SimulationTrace
from grpo_dist.workers import Workers


@dataclass(frozen=True, slots=True)
class FailureRates:
    """Mean seconds between two failures, 0: none. ``engine_s``: of each engine. ``rank_s``: of any policy
    rank. ``restart_s``: time from a failure until the worker serves again.
    """

    engine_s: float = 0.0
    rank_s: float = 0.0
    restart_s: float = RESTART_S


NO_FAILURES = FailureRates()


class SimulatedFailures:
    """Draws failures at random times, also during restarts."""

    def __init__(
        self,
        rates: FailureRates,
        engines: Sequence[Engine],
        load_balancer: LoadBalancer,
        trace: SimulationTrace,
        seed: int,
    ) -> None:
        self._rates, self._engines, self._load_balancer, self._trace = rates, engines, load_balancer, trace
        self.failed_engines = self.rank_restarts = 0
        self._down: set[int] = set()  # engines that are restarting
        self._rank_failed = asyncio.Event()
        rng = random.Random(seed)
        count = len(engines) if rates.engine_s else 0
        self._tasks = [asyncio.create_task(self._fail_engine(i, rng)) for i in range(count)]
        if rates.rank_s:
            self._tasks.append(asyncio.create_task(self._fail_ranks(rng)))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _fail_engine(self, index: int, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / self._rates.engine_s))
            self.failed_engines += 1
            self._down.add(index)
            self._drop_requests(index)
            async with self._trace.span(f"rollout-{index}", "restart"):
                await asyncio.sleep(self._rates.restart_s)
            self._down.discard(index)
            self._load_balancer.restore(index)

    async def _fail_ranks(self, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / self._rates.rank_s))
            self._rank_failed.set()

    def _drop_requests(self, index: int) -> None:
        """Fail the requests of an engine, and give it no new ones."""
        self._load_balancer.withdraw(index)
        self._engines[index].fail()

    async def run_ranks(self, stage: str, seconds: float) -> None:
        """Occupy all policy ranks for ``seconds``. Raises StateLost as soon as one of them fails, and at once
        where one has failed since the last call, as in production.
        """
        async with self._trace.span("policy", stage):
            try:
                async with asyncio.timeout(seconds):
                    await self._rank_failed.wait()
            except TimeoutError:
                return
        raise StateLost("a policy rank is lost")

    async def restart_ranks(self) -> None:
        """Restart all ranks and empty the engines. Raises StateLost where a rank fails meanwhile."""
        self.rank_restarts += 1
        self._rank_failed.clear()  # all ranks are new now
        for index in range(len(self._engines)):  # their requests belong to steps that are repeated
            self._drop_requests(index)
        await self.run_ranks("restart", self._rates.restart_s)
        for index, engine in enumerate(self._engines):
            engine.resume()
            if index not in self._down:  # the others return when their own restart ends
                self._load_balancer.restore(index)


class InMemoryCheckpoints:
    """Saving takes no time: production writes checkpoints in the background."""

    def __init__(self) -> None:
        self._newest = ResumePoint()

    async def save(self, step: int, workers: Workers, progress: Progress) -> None:
        self._newest = ResumePoint(Path(f"step_{step}"), progress)

    async def settle(self) -> None:
        """Return at once: no save is in progress."""

    async def newest(self) -> ResumePoint:
        return self._newest
