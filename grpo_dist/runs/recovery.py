"""Back to the last checkpoint within the same job: after the loss of what only a checkpoint has, and from a
step that must not have been.

driver.run --- StateLost or Rollback ---> what was written after the checkpoint is taken back
                                          workers: all that can stay as they are, the others anew
           <--- Place, Workers ---------- restored and synced as at any resume
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from grpo_dist.config import Config
from grpo_dist.errors import Rollback, StateLost
from grpo_dist.runs.checkpoint import Place
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.restarts import Budget
from grpo_dist.workers import Workers


class Restartable(Protocol):
    """`actors.cluster.Cluster` in production."""

    def losses_told(self) -> AbstractAsyncContextManager[None]: ...
    async def start_again(self, model_dir: Path) -> Workers: ...
    async def where_stuck(self) -> str: ...


class Record(Protocol):
    def warn(self, message: str) -> None: ...
    def back_to(self, step: int) -> None: ...


class Recovery:
    """Of one run. ``newest`` finds where it can go on from."""

    def __init__(
        self,
        config: Config,
        cluster: Restartable,
        record: Record,
        newest: Callable[[], Awaitable[Place]],
        model_dir: Path,
    ) -> None:
        self._config, self._cluster, self._record = config, cluster, record
        self._newest, self._model_dir = newest, model_dir
        # Of the loop: that of a simulated run is not the machine's.
        self._budget = Budget(config.cluster.restarts, clock=lambda: asyncio.get_running_loop().time())
        self._avoid: set[int] = set()

    async def carry_through(
        self,
        go_on: Callable[[Place, Workers], Awaitable[None]],
        place: Place,
        start: Callable[[], Awaitable[Workers]],
    ) -> None:
        """``go_on`` from ``place`` with whom ``start`` gives, again from a checkpoint as often as it takes.
        Raises what they raise, StateLost when no restart is left.
        """
        why: StateLost | Rollback | None = None
        workers: Workers | None = None
        while True:
            try:
                if why is None:
                    workers = await start()
                async with self._cluster.losses_told():
                    if why is not None:  # another may be lost meanwhile
                        place, workers = await self._go_back(why, workers)
                    assert workers is not None
                    return await go_on(place, workers)
            except (StateLost, Rollback) as error:
                why = error
                await self._turn_back(error)

    async def _turn_back(self, why: StateLost | Rollback) -> None:
        """Raises ``why`` when no restart is left."""
        if isinstance(why, Rollback):
            self._avoid.add(why.step)
            self._warn(why, "; rolling back")
            return
        delay_s = self._budget.take()
        if delay_s is None:
            again = "the same command goes on from the last checkpoint"
            self._warn(why, f"{self._budget.spent}: ending; {again}")
            raise why
        self._warn(why, f"; going back to the last checkpoint in {delay_s:g} s, {self._budget}")
        await asyncio.sleep(delay_s)

    async def _go_back(self, why: StateLost | Rollback, workers: Workers | None) -> tuple[Place, Workers]:
        """Where the run goes on and with whom, the weights not restored yet. ``workers``: None where they
        never came up.
        """
        place = await self._newest()
        self._record.warn(f"going on from {place}")
        self._record.back_to(place.step)
        health = place.progress.health
        avoid = tuple(sorted(self._avoid | set(health.avoid)))
        place = replace(place, progress=replace(place.progress, health=replace(health, avoid=avoid)))
        limit_s, stage = self._config.cluster.timeouts.up_s, "recovery: workers ready to go on"
        async with deadline(limit_s, stage, explain=self._cluster.where_stuck):
            if isinstance(why, StateLost) or place.checkpoint is None or workers is None:
                return place, await self._cluster.start_again(self._model_dir)
            await workers.rollouts.abandon()
            return place, workers

    def _warn(self, why: Exception, what_now: str) -> None:
        """The stacks of who is stuck come last, if there are any."""
        first, line, stacks = str(why).partition("\n")
        self._record.warn(f"{first}{what_now}{line}{stacks}")
