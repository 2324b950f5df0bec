"""The actors of one role: each is watched, and replaced where it dies or hangs.

    serving --lost--> back-off, made anew, started, given what it lacks --> serving
                        | again, as often as the budget goes
                        v
                      the role has failed: whoever waits for one of its actors is told

For actors whose state can be had again. The call that a lost one was in is repeated on another: whoever
called gets one answer, however many actors worked at it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from ray.exceptions import ObjectLostError, RayError

from actors.lifecycle.actor_spec import ActorSpec
from actors.lifecycle.calls import LOST, kill, reason, result, where_stuck_in
from actors.lifecycle.probe import ask_beside, ready
from actors.lifecycle.watchdog import deadline_of, numbered, where_stuck
from grpo_dist.errors import SamplesLost, StateLost, WorkerLost, cause_of
from grpo_dist.runtime.concurrency import deadline, gather
from grpo_dist.runtime.load_balancer import LoadBalancer
from grpo_dist.runtime.restarts import Budget

logger = logging.getLogger("grpo_dist")

_LATE_S = 1.0  # a deadline noticed so much later says that the driver itself was held up


class Team:
    """Driver-side handle of the actors of one role; made and used on one event loop. ``workers`` is the list
    of them, always as it is now.

    Args:
        makers: of each actor, given its name.
        start: begins the start of an actor, which can serve when what it returns is done.
        health: asks an actor how it is.
        room: sequences that one may have in hand, see `LoadBalancer`.
    """

    def __init__(
        self,
        role: str,
        makers: Sequence[Callable[[str], Any]],
        spec: ActorSpec,
        *,
        start: Callable[[Any], Any] = ready,
        health: Callable[[Any], Any] = ask_beside,
        room: int = sys.maxsize,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._role, self._makers, self._start, self._health = role, makers, start, health
        self._restarts, self._start_s = spec.restarts, spec.start_s
        self._irreplaceable = spec.irreplaceable
        self.workers = [make(f"{role}-{i}") for i, make in enumerate(makers)]
        self.load_balancer = LoadBalancer(len(self.workers), room, on_wait=on_wait)
        # What an actor that was started anew has to be given before it serves.
        self.catch_up: Callable[[Any], Coroutine[Any, Any, None]] | None = None
        self.on_lost: Callable[[int], None] = lambda _: None
        self._budgets = [Budget(spec.restarts) for _ in self.workers]
        self._told = -min(spec.generation, 1)
        self.failed = asyncio.Event()
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self.starting = set(self.named())  # names of the actors that have not come up yet

    async def ready(self) -> None:
        await gather(self._up(index, worker) for index, worker in enumerate(self.workers))
        self.watch()

    async def _up(self, index: int, worker: Any) -> None:
        await result(self._start(worker))
        self.starting.discard(self._name(index))

    def watch(self) -> None:
        """From now on, whoever dies or hangs is noticed; `ready` does it, too."""
        if self._restarts is not None:
            for index in range(len(self.workers)):
                task = asyncio.create_task(self._watch(index), name=f"health of {self._name(index)}")
                task.add_done_callback(self._ended)
                self._watching.append(task)

    def alive(self) -> list[Any]:
        """The actors that serve."""
        return [worker for i, worker in enumerate(self.workers) if i not in self._replacing]

    def states(self) -> list[bool]:
        """Of each actor, whether it serves. In any thread."""
        replacing = set(self._replacing)
        return [i not in replacing for i in range(len(self.workers))]

    def named(self) -> dict[str, Any]:
        """All actors by name, also those that are being replaced."""
        return numbered(self._role, self.workers)

    def is_current(self, index: int, worker: Any) -> bool:
        """Whether ``worker`` is the one that serves as number ``index``."""
        return index not in self._replacing and self.workers[index] is worker

    @property
    def is_whole(self) -> bool:
        """Whether every actor serves."""
        return not self._replacing and self._failure is None

    def check(self) -> None:
        """Raises what ended the role, if anything did."""
        if self._failure is not None:
            raise self._failure

    def restarted(self) -> float:
        """How many actors were replaced since this was last asked."""
        total, told = sum(budget.used for budget in self._budgets), self._told
        self._told = total
        return float(total - told)

    async def call(self, method: str, *arguments: Any, attempts: int | None = None) -> Any:
        """What the actor with the fewest calls in hand answers; of one that is lost meanwhile, another.
        Raises what of `LOST` it was when ``attempts`` actors were lost over it, and SamplesLost when one of
        ``arguments`` was.
        """
        made = 0
        while True:
            index = await self.load_balancer.admit(1, 1)
            worker, made = self.workers[index], made + 1
            try:
                return await getattr(worker, method).remote(*arguments)
            except LOST as error:
                self.lost(index, worker, error)
                if made == attempts:
                    raise
            except RayError as error:
                if isinstance(cause_of(error), ObjectLostError):
                    raise SamplesLost(f"{self._name(index)}: {reason(error)}") from error
                raise
            finally:
                if self.is_current(index, worker):
                    self.load_balancer.release(index, 1, 1)

    def lost(self, index: int, worker: Any, error: BaseException) -> None:
        """``worker``, number ``index``, answers no more: replace it. Whoever notices says so."""
        if not self.is_current(index, worker) or self._failure is not None:
            return
        self.load_balancer.withdraw(index)
        self.on_lost(index)
        try:
            delay_s = self._take(index, error)
        except WorkerLost as failure:
            kill([worker])
            self._fail(failure)
            return
        task = asyncio.create_task(self._replace(index, delay_s), name=f"restart of {self._name(index)}")
        self._replacing[index] = task
        task.add_done_callback(self._ended)

    async def weed_out(self, workers: Sequence[Any]) -> bool:
        """Something failed on ``workers``: find out who is lost. False: nobody is, it has another reason."""
        numbers = [self._number(worker) for worker in workers]
        found = await gather(self._is_well(i, w) for i, w in zip(numbers, workers, strict=True))
        return not all(found)

    async def ask_all(self) -> None:
        """Find out who is lost, and `check`."""
        await gather(self._is_well(i, worker) for i, worker in enumerate(list(self.workers)))
        self.check()

    async def _is_well(self, index: int | None, worker: Any) -> bool:
        if index is None or not self.is_current(index, worker):
            return False
        limit_s = self._restarts.hang_s if self._restarts else self._start_s
        try:
            async with deadline(limit_s, f"{self._name(index)} says how it is"):
                await self._health(worker)
        except RayError as error:
            self.lost(index, worker, error)
            return False
        except TimeoutError as error:
            await self._hangs(index, worker, str(error))
            return False
        return True

    async def _hangs(self, index: int, worker: Any, how: str) -> None:
        """`lost`, with where it is stuck: once it is killed nobody will know."""
        where = await where_stuck({self._name(index): worker})
        self.lost(index, worker, TimeoutError(f"{how}\n{where}"))

    def _number(self, worker: Any) -> int | None:
        return next((i for i, own in enumerate(self.workers) if own is worker), None)

    async def shutdown(self) -> None:
        """Nobody is watched or replaced any more; the actors are the caller's to end."""
        tasks = [*self._watching, *self._replacing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _replace(self, index: int, delay_s: float) -> None:
        while True:
            kill([self.workers[index]])
            await asyncio.sleep(delay_s)
            # Not the name of the one before: it may not be free yet.
            worker = self._makers[index](f"{self._name(index)}.{self._budgets[index].used}")
            self.workers[index] = worker
            try:
                stage = f"restart: {self._name(index)} comes up"
                async with deadline_of({self._name(index): worker}, self._start_s, stage):
                    await result(self._start(worker))
                await self._while_it_answers(index, worker, self._caught_up(index, worker))
            except (RayError, TimeoutError) as error:
                delay_s = self._take(index, error)
                continue
            logger.warning("%s serves again", self._name(index))
            return

    async def _caught_up(self, index: int, worker: Any) -> None:
        if self.catch_up is not None:
            await self.catch_up(worker)
        # At once, with nothing awaited before: whoever deals with all that serve deals with it, too.
        del self._replacing[index]
        self.load_balancer.restore(index)

    async def _while_it_answers(self, index: int, worker: Any, work: Coroutine[Any, Any, None]) -> None:
        """``work`` on an actor that does not serve yet, and so is not watched: ended when it hangs."""
        working, answering = asyncio.create_task(work), asyncio.create_task(self._answers_on(index, worker))
        try:
            done, _ = await asyncio.wait(  # bounded: `answering` fails when the actor hangs
                [working, answering], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # bounded: it is done
        finally:
            for task in (working, answering):
                task.cancel()
            await asyncio.gather(working, answering, return_exceptions=True)

    async def _answers_on(self, index: int, worker: Any) -> None:
        """Raises when it does not."""
        assert self._restarts is not None
        name = self._name(index)
        while True:
            await asyncio.sleep(self._restarts.health_s)
            async with deadline_of({name: worker}, self._restarts.hang_s, f"{name} says how it is"):
                await self._health(worker)

    def _take(self, index: int, error: BaseException) -> float:
        """One restart of the budget: the seconds to wait before it. Raises WorkerLost when none is left,
        StateLost when it cannot be replaced alone.
        """
        lost = f"{self._name(index)} is lost ({reason(error)})"
        where = where_stuck_in(error)
        if self._irreplaceable is not None:
            raise StateLost(f"{lost}: {self._irreplaceable}{where}") from error
        budget = self._budgets[index]
        delay_s = budget.take()
        if delay_s is None:
            raise WorkerLost(lost + budget.spent + where) from error
        logger.warning("%s; %s in %g s%s", lost, budget, delay_s, where)
        return delay_s

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What went wrong in a task that nobody awaits is told to all who want an actor of this role."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.load_balancer.fail(self._failure)
        self.failed.set()

    async def _watch(self, index: int) -> None:
        assert self._restarts is not None
        every_s, limit_s = self._restarts.health_s, self._restarts.hang_s - self._restarts.health_s
        seen: tuple[Any, float] | None = None
        since = 0.0
        while self._failure is None:
            await asyncio.sleep(every_s)
            worker, asked = self.workers[index], time.monotonic()
            if not self.is_current(index, worker):
                continue
            try:
                async with deadline(limit_s, f"{self._name(index)} says how it is"):
                    health = await self._health(worker)
            except RayError as error:
                self.lost(index, worker, error)
                continue
            except TimeoutError as error:
                if time.monotonic() - asked < limit_s + _LATE_S:
                    await self._hangs(index, worker, str(error))
                continue
            now = time.monotonic()
            if health.work is None:
                seen = None
            elif seen != (worker, health.work):
                seen, since = (worker, health.work), now
            elif now - since >= limit_s:
                stuck = f"{self._name(index)}: its work has not gone on for {now - since:.0f} s"
                await self._hangs(index, worker, stuck)

    def _name(self, index: int) -> str:
        return f"{self._role}-{index}"
