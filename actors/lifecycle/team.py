"""Create and watch the actors of one role, and replace those that die or hang.

    serving --lost--> back-off, created, started, caught up --> serving
                        | repeated within the restart budget
                        v
                      the role has failed: every caller gets the error

For actors whose state can be rebuilt. A lost actor's calls are repeated on another: callers get one answer.

Some actors of an `ElasticTeam`, the guests, join and leave while the others serve:

    absent --join--> created, started, caught up --> serving --leave--> finishes its groups --> absent
                       | it fails, or is lost                | it is lost
                       v                                     v
                     absent                                absent

A lost guest is not replaced, and costs the role no restart: its node may be gone for good. Its calls are
repeated on another actor, like the calls of any lost actor.

`ActorUsage` reads what all actors did during a step, right after its weight sync.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.exceptions import ObjectLostError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.lifecycle.calls import (
    LOST,
    PARALLEL,
    ask_in_parallel,
    deadline_of,
    kill,
    numbered,
    ready,
    reason,
    result,
    results,
    where_stuck,
    where_stuck_in,
)
from grpo_dist.config import RestartsConfig
from grpo_dist.config.cluster import HEALTH_S
from grpo_dist.errors import SamplesLost, StateLost, WorkerLost, find_cause
from grpo_dist.runtime.concurrency import Budget, deadline, gather
from grpo_dist.runtime.load_balancer import LoadBalancer
from grpo_dist.runtime.metering import Usage, usage_metrics
from grpo_dist.runtime.stage_log import say, seconds_text


@dataclass(frozen=True)
class GuestSpec:
    """Additional actors of a role, which join while the cluster has room, and leave again.

    Attributes:
        most: maximum number at once.
        cpus, gpus: devices of each, on one node.
    """

    most: int
    cpus: int
    gpus: int


@dataclass(frozen=True)
class ActorSpec:
    """Ray options, placement, restarts and deadlines of the actors of one role.

    Attributes:
        options: Ray options of every actor.
        actor_options: Ray options of each actor, such as its bundle, which override ``options``; None: none.
        restarts: None: actors are not watched or replaced, and a lost one ends the run.
        start_s: deadline of one restart, seconds.
        irreplaceable: why a lost actor cannot be replaced alone; None: it can.
        generation: how often all actors of this role were created before.
        on_gpu: whether they compute on GPUs.
        guests: actors beyond the reserved ones; None: there are none.
    """

    options: dict[str, Any] = field(default_factory=dict)
    actor_options: Sequence[dict[str, Any]] | None = None
    restarts: RestartsConfig | None = None
    start_s: float = 600.0
    irreplaceable: str | None = None
    generation: int = 0
    on_gpu: bool = False
    guests: GuestSpec | None = None

    @property
    def hang_s(self) -> float:
        """Seconds without an answer or progress until an actor counts as hung; ``start_s`` if not watched."""
        return self.restarts.hangs_after(on_gpu=self.on_gpu) if self.restarts else self.start_s

    def makers(self, actor: Any, count: int, *arguments: Any, **keywords: Any) -> list[Callable[[str], Any]]:
        """Return for each of ``count`` actors a function that takes a name and creates the actor.

        ``actor``: a Ray actor class; ``arguments``, ``keywords``: passed to its constructor.
        """
        placements = [{}] * count if self.actor_options is None else list(self.actor_options)
        assert len(placements) == count, f"{len(placements)} placements for {count} workers"

        def make(options: dict[str, Any], name: str) -> Any:
            if self.generation:  # the previous actor's name may still be taken
                name = f"{name}.{self.generation}"
            return actor.options(name=name, **self.options | options).remote(*arguments, **keywords)

        return [partial(make, options) for options in placements]

    def guest_maker(self, actor: Any, *arguments: Any) -> Callable[[str, str], Any]:
        """Return a function that creates a guest, given its name and Ray's node id."""

        def make(name: str, node: str) -> Any:
            assert self.guests is not None
            place = {
                "num_cpus": self.guests.cpus,
                "num_gpus": self.guests.gpus,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            return actor.options(name=name, **self.options | place).remote(*arguments)

        return make


logger = logging.getLogger("grpo_dist")

_LATE_S = 1.0  # a deadline that fires this late means that the driver itself was blocked


class Team:
    """Driver-side handle of the actors of one role, used on one event loop. ``workers``: the current actors.

    Args:
        makers: one function per actor, which creates it under a name.
        start: starts an actor; the actor can serve once the returned reference is done.
        health: calls an actor's health check.
        capacity: sequences in flight on one actor, see `LoadBalancer`.
        guests: number of indices after ``makers`` that guests may take later, see `ElasticTeam`. An absent
            actor is None in ``workers``.
    """

    def __init__(
        self,
        role: str,
        makers: Sequence[Callable[[str], Any]],
        spec: ActorSpec,
        *,
        start: Callable[[Any], Any] = ready,
        health: Callable[[Any], Any] = ask_in_parallel,
        capacity: int = sys.maxsize,
        guests: int = 0,
    ) -> None:
        self._role, self._makers, self._start, self._health = role, makers, start, health
        self._restarts, self._start_s, self._hang_s = spec.restarts, spec.start_s, spec.hang_s
        self._irreplaceable, self._capacity = spec.irreplaceable, capacity
        self.workers: list[Any] = [make(f"{role}-{i}") for i, make in enumerate(makers)] + [None] * guests
        self._absent = set(range(len(makers), len(self.workers)))
        self.load_balancer = LoadBalancer(len(self.workers), capacity)
        for index in self._absent:
            self.load_balancer.withdraw(index)
        # Updates a restarted actor before it serves.
        self.catch_up: Callable[[Any], Coroutine[Any, Any, None]] | None = None
        self.on_lost: Callable[[int], None] = lambda _: None
        self._budgets = [Budget(spec.restarts) for _ in self.workers]
        # -1 for a restarted role, so that `restarted` counts its restart once.
        self._reported_restarts = -min(spec.generation, 1)
        self.failed = asyncio.Event()
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self.starting = set(self.named())  # names of actors that are not ready yet

    async def ready(self) -> None:
        present = [(i, worker) for i, worker in enumerate(self.workers) if i not in self._absent]
        await gather(self._up(index, worker) for index, worker in present)
        self.watch()

    async def _up(self, index: int, worker: Any) -> None:
        await result(self._start(worker))
        self.starting.discard(self._name(index))

    def watch(self) -> None:
        """Start watching for actors that die or hang; `ready` calls this."""
        if self._restarts is not None:
            for index in range(len(self.workers)):
                task = asyncio.create_task(self._watch(index), name=f"health of {self._name(index)}")
                task.add_done_callback(self._ended)
                self._watching.append(task)

    def oversee(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in the background until `shutdown`; its failure fails the role."""
        task = asyncio.create_task(work, name=f"watch over {self._role}")
        task.add_done_callback(self._ended)
        self._watching.append(task)

    def alive(self) -> list[Any]:
        """Return the serving actors."""
        return [worker for i, worker in enumerate(self.workers) if self._serves(i)]

    def states(self) -> list[bool | None]:
        """Return whether each actor serves; None: it is absent. Thread-safe."""
        replacing, absent = set(self._replacing), set(self._absent)
        return [None if i in absent else i not in replacing for i in range(len(self.workers))]

    def named(self) -> dict[str, Any]:
        """Return all actors by name, including those being replaced."""
        every = numbered(self._role, self.workers)
        return {name: worker for name, worker in every.items() if worker is not None}

    def is_current(self, index: int, worker: Any) -> bool:
        """Return whether ``worker`` is the serving actor at ``index``."""
        return self._serves(index) and self.workers[index] is worker

    def _serves(self, index: int) -> bool:
        return index not in self._replacing and index not in self._absent

    @property
    def is_whole(self) -> bool:
        """True while every actor serves."""
        return not self._replacing and self._failure is None

    def check(self) -> None:
        """Raise the error that ended the role, if any."""
        if self._failure is not None:
            raise self._failure

    def restarted(self) -> float:
        """Return how many actors were replaced since the last call."""
        total, reported = sum(budget.used for budget in self._budgets), self._reported_restarts
        self._reported_restarts = total
        return float(total - reported)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call ``method`` of an actor, see `send`."""
        return await self.send(lambda worker: getattr(worker, method).remote(*arguments))

    async def send(self, call: Callable[[Any], Awaitable[Any]], *, attempts: int | None = None) -> Any:
        """Return the result of ``call`` on the actor with the fewest calls in flight, or on another if that
        one is lost.

        Raises the last of the `LOST` errors when ``attempts`` actors were lost during the call, and
        SamplesLost when an argument was lost. With ``attempts``, a repeated call probes its actor first: Ray
        reports the actors of a lost node one by one, and an actor that is already gone does not count as an
        attempt. The last attempt has an actor to itself, so that no other call can have killed it.
        """
        tries = 0
        while True:
            calls = self._capacity if tries and tries + 1 == attempts else 1
            index = await self.load_balancer.admit(calls, 1)
            worker = self.workers[index]
            try:
                if tries and attempts is not None and not await self._probe(index, worker):
                    continue
                tries += 1
                return await call(worker)
            except LOST as error:
                self.lost(index, worker, error)
                if tries == attempts:
                    raise
            except RayError as error:
                if isinstance(find_cause(error), ObjectLostError):
                    raise SamplesLost(f"{self._name(index)}: {reason(error)}") from error
                raise
            finally:
                if self.is_current(index, worker):
                    self.load_balancer.release(index, calls, 1)

    def lost(self, index: int, worker: Any, error: BaseException) -> None:
        """Replace ``worker``, at ``index``, which no longer answers. Any caller that notices calls this."""
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

    async def find_dead(self, workers: Sequence[Any]) -> bool:
        """Probe ``workers`` after a failed call, and return whether one is lost; False: another cause."""
        indices = [self._find_index(worker) for worker in workers]
        answers = await gather(self._probe(i, w) for i, w in zip(indices, workers, strict=True))
        return not all(answers)

    async def ask_all(self) -> None:
        """Probe every actor, then `check`."""
        await gather(self._probe(i, worker) for i, worker in enumerate(list(self.workers)))
        self.check()

    async def _probe(self, index: int | None, worker: Any) -> bool:
        if index is None or not self.is_current(index, worker):
            return False
        try:
            async with deadline(self._hang_s, f"{self._name(index)} answers its health check"):
                await self._health(worker)
        except RayError as error:
            self.lost(index, worker, error)
            return False
        except TimeoutError as error:
            await self._mark_hung(index, worker, str(error))
            return False
        return True

    async def _mark_hung(self, index: int, worker: Any, how: str) -> None:
        """Report a hung actor as lost, with its stacks, which are read before it is killed."""
        where = await where_stuck({self._name(index): worker})
        self.lost(index, worker, TimeoutError(f"{how}\n{where}"))

    def _find_index(self, worker: Any) -> int | None:
        return next((i for i, current in enumerate(self.workers) if current is worker), None)

    async def shutdown(self) -> None:
        """Stop watching and replacing; the caller ends the actors."""
        tasks = [*self._watching, *self._replacing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _replace(self, index: int, delay_s: float) -> None:
        while True:
            kill([self.workers[index]])
            await asyncio.sleep(delay_s)
            # The previous actor's name may still be taken.
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
        while (catch_up := self.catch_up) is not None:
            await catch_up(worker)
            if catch_up == self.catch_up:
                break  # else the policy was replaced meanwhile, and these weights are the old policy's
        # No await in between: from here on, calls to all serving actors include this one.
        del self._replacing[index]
        self.load_balancer.restore(index)

    async def _while_it_answers(self, index: int, worker: Any, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` on an actor that is not watched, as it does not serve yet; cancel it if it hangs."""
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
        """Probe ``worker`` until cancelled. Raises TimeoutError when it does not answer."""
        name = self._name(index)
        while True:
            await asyncio.sleep(HEALTH_S)
            async with deadline_of({name: worker}, self._hang_s, f"{name} answers its health check"):
                await self._health(worker)

    def _take(self, index: int, error: BaseException) -> float:
        """Take one restart from the budget and return the seconds to wait before it.

        Raises WorkerLost when none is left, StateLost when the actor cannot be replaced alone.
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
        """Propagate a background task's failure to every caller of this role."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.load_balancer.fail(self._failure)
        self.failed.set()

    async def _watch(self, index: int) -> None:
        every_s, limit_s = HEALTH_S, self._hang_s - HEALTH_S
        last_progress: tuple[Any, float] | None = None
        since = 0.0
        while self._failure is None:
            await asyncio.sleep(every_s)
            worker, asked_at = self.workers[index], time.monotonic()
            if not self.is_current(index, worker):
                continue
            try:
                async with deadline(limit_s, f"{self._name(index)} answers its health check"):
                    health = await self._health(worker)
            except RayError as error:
                self.lost(index, worker, error)
                continue
            except TimeoutError as error:
                if time.monotonic() - asked_at < limit_s + _LATE_S:
                    await self._mark_hung(index, worker, str(error))
                continue
            now = time.monotonic()
            if health.work is None:
                last_progress = None
            elif last_progress != (worker, health.work):
                last_progress, since = (worker, health.work), now
            elif now - since >= limit_s:
                stuck = f"{self._name(index)}: its work has made no progress for {now - since:.0f} s"
                await self._mark_hung(index, worker, stuck)

    def _name(self, index: int) -> str:
        return f"{self._role}-{index}"


class FrozenPool:
    """Driver-side handle of a role whose actors hold copies of a frozen model.

    Attributes:
        turn: entered for each call that needs GPUs, see `Colocation`.
    """

    def __init__(self, team: Team) -> None:
        self.team, self.workers = team, team.workers
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    async def ready(self) -> None:
        await self.team.ready()

    async def sleep(self) -> None:
        """Free the GPUs; the caller sets the deadline."""
        await results(worker.sleep.remote() for worker in self.workers)

    async def wake_up(self) -> None:
        """Undo `sleep`."""
        await results(worker.wake_up.remote() for worker in self.workers)

    async def shutdown(self) -> None:
        await self.team.shutdown()
        kill(self.workers)


_POLL_S = 0.1  # while a leaving guest finishes its groups

# Guests that joined and left between two steps, and the seconds of the slowest join and leave.
_NO_CHANGE = {"engines/joined": 0.0, "engines/left": 0.0, "engines/join_s": 0.0, "engines/leave_s": 0.0}


class ElasticTeam(Team):
    """A `Team` with guests, whose indices begin at ``len(makers)``.

    Args:
        guest: creates a guest, given its name and Ray's node id.
    """

    def __init__(
        self,
        role: str,
        makers: Sequence[Callable[[str], Any]],
        spec: ActorSpec,
        *,
        guest: Callable[[str, str], Any],
        **options: Any,
    ) -> None:
        assert spec.guests is not None and spec.restarts is not None
        super().__init__(role, makers, spec, guests=spec.guests.most, **options)
        self.reserved, self._guest = len(makers), guest
        self._nodes: dict[int, str] = {}  # node of each guest
        self._leaving: set[int] = set()
        self._created = 0  # number of guests so far
        self._changes = dict(_NO_CHANGE)
        # Held while a guest leaves, so that no weights are in transit to it.
        self.between_syncs: AbstractAsyncContextManager[Any] = nullcontext()

    @property
    def is_whole(self) -> bool:
        """True while every reserved actor serves; guests do not count."""
        return self._failure is None and all(index >= self.reserved for index in self._replacing)

    def guests(self) -> dict[int, str]:
        """Return the node of each guest that serves or joins, by index; without leaving guests."""
        return {index: node for index, node in self._nodes.items() if index not in self._leaving}

    def free_places(self) -> list[int]:
        """Return the indices that no guest has."""
        return sorted(self._absent)

    def metrics(self) -> dict[str, float]:
        """Return how many actors serve, and how many guests joined and left since the last call."""
        changes, self._changes = self._changes, dict(_NO_CHANGE)
        return {"engines/serving": float(len(self.alive())), **changes}

    def lost(self, index: int, worker: Any, error: BaseException) -> None:
        """See `Team.lost`. A guest becomes absent."""
        if index < self.reserved:
            super().lost(index, worker, error)
        elif self.is_current(index, worker) and self._failure is None:
            logger.warning("%s is lost (%s); others sample its groups", self._name(index), reason(error))
            self._changes["engines/left"] += 1
            self._remove(index)

    def join(self, index: int, node: str) -> asyncio.Task[None]:
        """Start guest ``index`` on ``node``; it serves once the returned task is done, unless it fails."""
        self._created += 1
        worker = self._guest(f"{self._name(index)}.guest{self._created}", node)
        self.workers[index], self._nodes[index] = worker, node
        self._absent.discard(index)
        task = asyncio.create_task(self._join(index, worker), name=f"{self._name(index)} joins")
        self._replacing[index] = task
        task.add_done_callback(self._ended)
        return task

    async def _join(self, index: int, worker: Any) -> None:
        name, begin = self._name(index), time.monotonic()
        try:
            async with deadline_of({name: worker}, self._start_s, f"{name} joins"):
                await result(self._start(worker))
            await self._while_it_answers(index, worker, self._caught_up(index, worker))
        except (RayError, TimeoutError, StateLost) as error:  # StateLost: a policy failure; others notice it
            self._replacing.pop(index, None)
            logger.warning("%s could not join (%s)", name, reason(error))
            self._remove(index)
            return
        seconds = time.monotonic() - begin
        self._changes["engines/joined"] += 1
        self._changes["engines/join_s"] = max(self._changes["engines/join_s"], seconds)
        say(f"{name} has joined, after {seconds_text(seconds)}")

    async def leave(self, index: int, why: str, *, within_s: float) -> None:
        """Give guest ``index`` no more groups, and end it once its groups are finished. Other actors repeat,
        with the same seeds, the groups that are unfinished after ``within_s`` seconds.
        """
        worker, begin = self.workers[index], time.monotonic()
        self._leaving.add(index)
        try:
            if index in self._replacing:  # its join fails, as for any actor that dies
                kill([worker])
                return
            self.load_balancer.close(index)
            await self._drained(index, worker, begin + within_s)
            if self.is_current(index, worker):
                self._remove(index)
                self._note_left(index, why, time.monotonic() - begin)
        finally:
            self._leaving.discard(index)

    async def _drained(self, index: int, worker: Any, end: float) -> None:
        """Return once the guest has no groups and no sync is running, at ``end`` at the latest."""
        while self._has_work(index, worker) and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        try:
            async with asyncio.timeout(max(_POLL_S, end - time.monotonic())), self.between_syncs:
                pass  # the removal follows with no await in between
        except TimeoutError:
            pass  # the sync is repeated without this guest

    def _has_work(self, index: int, worker: Any) -> bool:
        return self.is_current(index, worker) and self.load_balancer.sequences(index) > 0

    def _note_left(self, index: int, why: str, seconds: float) -> None:
        self._changes["engines/left"] += 1
        self._changes["engines/leave_s"] = max(self._changes["engines/leave_s"], seconds)
        say(f"{self._name(index)} has left ({why}), after {seconds_text(seconds)}")

    def _remove(self, index: int) -> None:
        """Make the guest absent: kill its process; other actors repeat its unfinished calls."""
        worker = self.workers[index]
        self.load_balancer.withdraw(index)
        self.on_lost(index)
        kill([worker])
        self._absent.add(index)
        self.workers[index] = None
        del self._nodes[index]


class ActorUsage:
    """Reads and adds up the usage of all actors.

    ``teams``: the teams of each role. ``queueing``: roles of `calls.one_at_a_time`, which are asked in
    parallel to their work, as their queues hold later batches. ``latest``: usage by actor at the last `read`.
    """

    def __init__(
        self, teams: Mapping[str, Sequence[Team]], *, queueing: Collection[str], timeout_s: float
    ) -> None:
        self._teams, self._queueing, self._timeout_s = teams, queueing, timeout_s
        self.latest: dict[str, Usage] = {}

    async def read(self) -> dict[str, float]:
        """Return metrics of the work since the last call, and the number of restarts per role."""
        named = self._serving()
        actors = {name: actor for name, (_, actor) in named.items()}
        async with deadline_of(actors, self._timeout_s, f"usage of {len(named)} actors"):
            usages = await gather(self._read_one(*who) for who in named.values())
        self.latest = {name: usage for name, usage in zip(named, usages, strict=True) if usage is not None}
        restarts = {
            f"restarts/{r}": sum(t.restarted() for t in teams) for r, teams in self._teams.items() if teams
        }
        elastic = [team for teams in self._teams.values() for team in teams if isinstance(team, ElasticTeam)]
        joined = elastic[0].metrics() if elastic else {}
        return usage_metrics(self.latest) | restarts | joined

    def states(self) -> dict[str, bool]:
        """Return whether each actor serves, by name; False: it is being replaced."""
        return {
            f"{role}-{i}": serves
            for role, teams in self._teams.items()
            for i, serves in enumerate(state for team in teams for state in team.states())
            if serves is not None
        }

    def _serving(self) -> dict[str, tuple[str, Any]]:
        """Return the role and the actor of each name in `states` that serves; an actor being replaced
        answers only once it is ready.
        """
        states = self.states()
        return {
            name: (role, actor)
            for role, teams in self._teams.items()
            for name, actor in numbered(role, (worker for team in teams for worker in team.workers)).items()
            if states.get(name)
        }

    async def _read_one(self, role: str, actor: Any) -> Usage | None:
        """Return the usage of one actor; None: it is lost, which its team notices."""
        in_parallel = role in self._queueing
        ask = actor.usage.options(concurrency_group=PARALLEL) if in_parallel else actor.usage
        try:
            usage: Usage = await ask.remote()
        except LOST:
            return None
        return usage
