"""Engines and policy ranks of a simulated run that are lost now and then, and the way back: what `Recovery`
asks of a cluster and of checkpoints.

    engine lost    its groups go to others   restart ...... serves again
    rank lost      StateLost at the policy's next call, or in the one that is under way
                   restart of all ranks ...... from the last checkpoint; a further loss meanwhile: once more
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_dist.errors import StateLost
from grpo_dist.loop.progress import Progress
from grpo_dist.runs.checkpoint import Place
from grpo_dist.runtime.load_balancer import Admission
from grpo_dist.tools.plan.engines import Engine
from grpo_dist.tools.plan.stragglers import RESTART_S
from grpo_dist.workers import Workers


@dataclass(frozen=True, slots=True)
class LossRates:
    """Mean seconds between two losses, 0: none. ``engine_s``: of an engine, each; ``rank_s``: of any policy
    rank; ``restart_s``: until what was lost serves again.
    """

    engine_s: float = 0.0
    rank_s: float = 0.0
    restart_s: float = RESTART_S


NO_LOSSES = LossRates()


class Losses:
    """``doing(track, stage)``: draws what is done within it; ``workers``: of the run as it goes on. They come
    when they come, also while something is started anew.
    """

    def __init__(
        self,
        rates: LossRates,
        engines: Sequence[Engine],
        admission: Admission,
        *,
        seed: int,
        doing: Callable[[str, str], AbstractAsyncContextManager[None]],
        workers: Callable[[], Workers],
    ) -> None:
        self._rates, self._engines, self._admission = rates, engines, admission
        self._doing, self._workers = doing, workers
        self.engines_lost = self.gone_back = 0
        self._down: set[int] = set()  # engines that are started anew
        self._rank_lost = asyncio.Event()
        chance = random.Random(seed)
        count = len(engines) if rates.engine_s else 0
        self._tasks = [asyncio.create_task(self._lose(i, chance)) for i in range(count)]
        if rates.rank_s:
            self._tasks.append(asyncio.create_task(self._lose_ranks(chance)))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _lose(self, index: int, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1 / self._rates.engine_s))
            self.engines_lost += 1
            self._down.add(index)
            self._take_from(index)
            async with self._doing(f"rollout-{index}", "restart"):
                await asyncio.sleep(self._rates.restart_s)
            self._down.discard(index)
            self._admission.restore(index)

    async def _lose_ranks(self, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(1 / self._rates.rank_s))
            self._rank_lost.set()

    def _take_from(self, index: int) -> None:
        """All that the engine has in hand, and what it would be given."""
        self._admission.withdraw(index)
        self._engines[index].fail()

    async def with_ranks(self, stage: str, seconds: float) -> None:
        """What all policy ranks are busy with. Raises StateLost as soon as one of them is lost, and at once
        where that was since the last call, as in production.
        """
        async with self._doing("policy", stage):
            try:
                async with asyncio.timeout(seconds):
                    await self._rank_lost.wait()
            except TimeoutError:
                return
        raise StateLost("a policy rank is lost")

    @asynccontextmanager
    async def losses_told(self) -> AsyncIterator[None]:
        yield

    async def start_again(self, model_dir: Path) -> Workers:
        """Raises StateLost where a rank is lost meanwhile."""
        self.gone_back += 1
        self._rank_lost.clear()  # of ranks that are all new now
        for index in range(len(self._engines)):  # which sampled for steps that are not
            self._take_from(index)
        await self.with_ranks("restart", self._rates.restart_s)
        for index, engine in enumerate(self._engines):
            engine.resume()
            if index not in self._down:  # such a one comes back when its own restart ends
                self._admission.restore(index)
        return self._workers()

    async def where_stuck(self) -> str:
        return ""


class Checkpoints:
    """They cost nothing here: in production they are written beside the loop."""

    def __init__(self) -> None:
        self._place = Place()

    async def save(self, step: int, workers: Workers, progress: Progress) -> None:
        self._place = Place(Path(f"step_{step}"), step, progress)

    async def settle(self) -> None:
        """There is none to wait for."""

    async def newest(self) -> Place:
        return self._place
