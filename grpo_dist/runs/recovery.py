"""Returns to the newest checkpoint within the same job, after losing state that only a checkpoint holds, or
on a health rollback.

driver.run --- StateLost or Rollback ---> records of steps after the checkpoint are dropped
                                          workers: kept if possible, the others started again
           <--- ResumePoint, Workers ---- restored and synced as at any resume
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.config import ClusterConfig
from grpo_dist.errors import Rollback, StateLost
from grpo_dist.runs.checkpoint import ResumePoint
from grpo_dist.runtime.concurrency import Budget, deadline
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.runtime.stage_log import stage
from grpo_dist.workers import Workers

if TYPE_CHECKING:  # Ray takes seconds to import
    from actors.cluster import Cluster

Up = tuple[ResumePoint, Workers]  # the resume point, and running workers
Attempt = AbstractAsyncContextManager[Up, bool | None]


class Recovery:
    """Decides after each failure of a run whether and where it resumes.

    async for attempt in recovery.attempts():
        async with attempt as (point, workers):
            ...  # restore the weights of `point`, and train to the end
    """

    def __init__(
        self,
        settings: ClusterConfig,
        cluster: Cluster,
        recorder: Recorder,
        newest: Callable[[], Awaitable[ResumePoint]],
        model_dir: Path,
        *,
        first: ResumePoint,
        start: Callable[[], Awaitable[Workers]],
        remedy: str,
    ) -> None:
        """``first`` and ``start``: resume point and workers of the first attempt. ``newest`` finds the resume
        point of later attempts. ``remedy``: how another job resumes the run, for the last warning.
        """
        self._settings, self._cluster, self._recorder = settings, cluster, recorder
        self._newest, self._model_dir = newest, model_dir
        self._first, self._start, self._remedy = first, start, remedy
        # The loop's clock: simulations replace it.
        self._budget = Budget(settings.restarts, clock=lambda: asyncio.get_running_loop().time())
        self._avoid: set[int] = set()
        self._workers: Workers | None = None
        self._failure: StateLost | Rollback | None = None
        self._done = False

    async def attempts(self) -> AsyncIterator[Attempt]:
        """Yield attempts until the block of one ends without a failure that a restart can repair.

        An attempt yields a resume point and running workers, whose weights are not restored yet. Inside its
        block, failures of actors become StateLost. Raises the failure for which no restart is left.
        """
        while not self._done:
            up = None
            async with self._restarting():
                up = await self._bring_up()
            if up is not None:
                yield self._attempt(up)

    @asynccontextmanager
    async def _attempt(self, up: Up) -> AsyncIterator[Up]:
        async with self._restarting():
            async with self._cluster.failures_as_state_lost():
                yield up
            self._done = True

    @asynccontextmanager
    async def _restarting(self) -> AsyncIterator[None]:
        """Suppress a failure of the block that a restart can repair."""
        try:
            yield
        except (StateLost, Rollback) as failure:
            await self._consume_restart(failure)

    async def _bring_up(self) -> Up:
        """Start the workers of the first attempt, or bring up the workers of a failed attempt again."""
        if self._failure is None:
            self._workers = await self._start()
            return self._first, self._workers
        async with self._cluster.failures_as_state_lost():  # another worker may be lost meanwhile
            point, self._workers = await self._go_back(self._failure, self._workers)
            return point, self._workers

    async def _consume_restart(self, failure: StateLost | Rollback) -> None:
        """Wait until the next attempt may begin. Raises ``failure`` when no restart is left."""
        self._failure = failure
        if isinstance(failure, Rollback):
            self._avoid.add(failure.step)
            self._warn(failure, "; rolling back")
            return
        delay_s = self._budget.take()
        if delay_s is None:
            self._warn(failure, f"{self._budget.spent}: ending; {self._remedy}")
            raise failure
        self._warn(failure, f"; going back to the last checkpoint in {delay_s:g} s, {self._budget}")
        await asyncio.sleep(delay_s)

    async def _go_back(self, failure: StateLost | Rollback, workers: Workers | None) -> Up:
        """Find the resume point, and bring the workers up again. ``workers``: None if they never came up."""
        with stage("newest checkpoint", quiet=True):
            point = await self._newest()
        self._recorder.warn(f"resuming from {point}")
        self._recorder.back_to(point.step)
        health = point.progress.health
        avoid = tuple(sorted(self._avoid | set(health.avoid)))
        point = replace(point, progress=replace(point.progress, health=replace(health, avoid=avoid)))
        limit_s, what = self._settings.timeouts.up_s, "recovery: workers up again"
        async with deadline(limit_s, what, explain=self._cluster.where_stuck):
            if isinstance(failure, StateLost) or point.checkpoint is None or workers is None:
                return point, await self._cluster.start_again(self._model_dir)
            await workers.rollouts.abandon()
            return point, workers

    def _warn(self, failure: Exception, consequence: str) -> None:
        """Warn of ``failure``. Stacks of stuck processes, if any, come after ``consequence``."""
        first, line, stacks = str(failure).partition("\n")
        self._recorder.warn(f"{first}{consequence}{line}{stacks}")
