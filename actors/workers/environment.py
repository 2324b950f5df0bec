"""Environment workers: each runs the environments and tools of many episodes, in killable processes.

driver    EnvironmentPool: starts, watches and replaces workers, and sends their addresses to the engines
engines   an episode calls its worker itself, turn by turn: neither the driver nor the engine waits for a tool

Episodes of a lost worker are lost: the engines restart them with the same seeds, on another worker or on the
replacement. Nothing else is resampled.

Episodes that finish an action in the same engine step call their environments at the same moment. One call
per episode would keep the engine's process busier than the tools, so `EnvironmentCalls` batches calls.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray

from actors.lifecycle.calls import Health, Probeable, end, reason, results
from actors.lifecycle.team import ActorSpec, Team
from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.base import Problem
from grpo_dist.environments.episode import Action, Observed
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.stacks import pending_calls
from grpo_dist.runtime.stage_log import say
from grpo_dist.types import Task

# Maximum wait for all answers of one call; slower answers are fetched one by one. A call costs both sides
# about a millisecond, more than most tools take.
_AT_ONCE_S = 0.005
# Number of ended episodes to remember: their last actions may arrive after their ends.
_ENDED = 100_000


class ActingEpisode(NamedTuple):
    """An episode's name, and the arguments of its environment. A tuple is cheapest to send."""

    name: str
    task: Task
    problem: Problem


class Act(NamedTuple):
    """An action for the environment of ``episode``; turn 0 starts the environment."""

    episode: ActingEpisode
    action: Action
    turn: int


@dataclass(frozen=True)
class EnvironmentAddresses:
    """The workers that engines may use. ``number``: the highest is the newest. ``failure``: why lost workers
    are no longer replaced; "": they are replaced.
    """

    number: int
    workers: tuple[Any, ...]
    failure: str = ""


class EnvironmentWorker(Metered, Probeable):
    """Runs episodes, named "<engine>:<number>". Methods run concurrently on the actor's event loop."""

    def __init__(self, settings: EnvironmentsConfig, *, sandboxed: bool = True) -> None:
        """``sandboxed``: an environment may run code that the policy writes."""
        super().__init__()
        self._settings, self._sandboxed = settings, sandboxed
        self._runner: Any = None
        self._notes: list[str] = []
        self._episodes: defaultdict[str, set[str]] = defaultdict(set)  # running episodes by engine
        self._lost_engines: set[str] = set()
        self._ended: dict[str, None] = {}  # oldest first
        self._acting: dict[str, asyncio.Task[Observed]] = {}  # actions whose answers are not delivered yet

    async def start(self) -> None:
        """Start the runner that all episodes share. Raises UserError for an unusable environment."""
        from grpo_dist.environments.runner import EpisodeRunner  # the driver's handle does not need it

        self._runner = EpisodeRunner(self._settings)
        self._notes = await self._runner.start(sandboxed=self._sandboxed)

    async def notes(self) -> list[str]:
        """Return notes for the user about this worker, such as how strong its sandbox is."""
        return self._notes

    async def prepare(self, episodes: Sequence[ActingEpisode]) -> None:
        """Start the processes of episodes while their first actions are sampled."""
        running = [episode for episode in episodes if not self._why_over(episode.name)]
        for episode in running:
            self._episodes[_engine_of(episode.name)].add(episode.name)
        await asyncio.gather(*(self._runner.begin(e.name, e.task, e.problem) for e in running))

    @metered("act")
    async def act(self, acts: Sequence[Act]) -> list[Observed | None]:
        """Give each action to its environment; return the answers that are ready at once. None: call
        `answer`, which waits for it or raises the action's error. A single action delays no others, so this
        call waits for its answer.
        """
        tasks = {
            act.episode.name: asyncio.create_task(self._act(act), name=f"episode {act.episode.name}")
            for act in acts
        }
        self._acting |= tasks  # before the wait, in which `end` may cancel them
        # bounded: an environment, and each of its tools, has a deadline
        await asyncio.wait(tasks.values(), timeout=_AT_ONCE_S if len(acts) > 1 else None)
        return [self._answer_at_once(episode, task) for episode, task in tasks.items()]

    def _answer_at_once(self, episode: str, task: asyncio.Task[Observed]) -> Observed | None:
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        self._acting.pop(episode, None)
        return task.result()  # bounded: it is done

    @metered("act")
    async def answer(self, episode: str) -> Observed:
        """Wait for the answer to the last action of ``episode``."""
        try:
            return await self._acting[episode]
        finally:
            self._acting.pop(episode, None)

    async def _act(self, act: Act) -> Observed:
        name, task, problem = act.episode.name, act.episode.task, act.episode.problem
        if why := self._why_over(name):
            return Observed(failed=why)
        self._episodes[_engine_of(name)].add(name)
        observed: Observed = await self._runner.act(name, task, problem, act.action, turn=act.turn)
        return observed

    def _why_over(self, episode: str) -> str:
        """Return why an episode cannot continue; "": it can. Its last calls may arrive after its end."""
        if _engine_of(episode) in self._lost_engines:
            return "the engine is lost"
        return "the episode has ended" if episode in self._ended else ""

    async def end(self, episodes: Sequence[str]) -> None:
        """End episodes of this worker and their processes."""
        for episode in episodes:
            self._episodes[_engine_of(episode)].discard(episode)
            self._ended[episode] = None
            if (acting := self._acting.pop(episode, None)) is not None:
                acting.cancel()  # no caller waits for the answer
        while len(self._ended) > _ENDED:
            del self._ended[next(iter(self._ended))]
        await asyncio.gather(*(self._runner.end(episode) for episode in episodes))  # a failure ends no other

    async def end_all(self, engine: str) -> None:
        """End all episodes of a lost engine."""
        self._lost_engines.add(engine)
        await self.end(list(self._episodes.pop(engine, set())))

    async def health(self) -> Health:  # type: ignore[override]  # on the event loop, like all the rest
        return Health()

    async def calls(self) -> str:
        """Return where the pending calls wait."""
        return pending_calls()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()


def _engine_of(episode: str) -> str:
    return episode.rpartition(":")[0]


class EnvironmentPool:
    """Driver-side handle: starts and supervises the workers, and sends their addresses to the engines."""

    def __init__(
        self,
        settings: EnvironmentsConfig,
        actors: ActorSpec,
        *,
        sandboxed: bool = True,
        worker: type = EnvironmentWorker,
    ) -> None:
        """``sandboxed``: see `EnvironmentWorker`."""
        actors = replace(actors, options={"max_concurrency": 10_000} | actors.options)
        self.team = Team(
            "environment",
            actors.makers(ray.remote(worker), settings.num_workers, settings, sandboxed=sandboxed),
            actors,
            start=lambda worker: worker.start.remote(),
            health=lambda worker: worker.health.remote(),  # on its event loop, in parallel to its work
        )
        self.workers = self.team.workers
        self.team.catch_up = self._announce
        self.engines: list[Team] = []  # each `RolloutPool` adds its team
        self._number = 0
        self._noted: set[str] = set()
        self._failing: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        await self.team.ready()
        self._failing = asyncio.create_task(self._announce_failure(), name="failure of environment workers")
        await self._say_notes(self.workers)

    async def _say_notes(self, workers: Sequence[Any]) -> None:
        """Show the user these workers' notes, each note once."""
        for note in itertools.chain(*await results(worker.notes.remote() for worker in workers)):
            if note not in self._noted:
                self._noted.add(note)
                say(f"environments: {note}")

    def addresses(self, *further: Any) -> EnvironmentAddresses:
        """Return the serving workers, and ``further`` ones that are about to serve."""
        self._number += 1
        return EnvironmentAddresses(self._number, (*self.team.alive(), *further), self._failure())

    def _failure(self) -> str:
        try:
            self.team.check()
        except Exception as error:
            return reason(error)
        return ""

    def end_all(self, engine: Any) -> None:
        """End all episodes of a lost engine, without waiting for it."""
        for worker in self.team.alive():
            worker.end_all.remote(engine_name(engine))

    async def shutdown(self) -> None:
        if self._failing is not None:
            self._failing.cancel()
        await self.team.shutdown()
        await end(self.workers)

    async def _announce(self, replacement: Any) -> None:
        await self._say_notes([replacement])  # the team ends this wait when the replacement is lost
        # No await until it serves: other addresses sent meanwhile would lack it.
        self._tell_engines(self.addresses(replacement))

    async def _announce_failure(self) -> None:
        """Send the role's failure to episodes that wait for a worker."""
        await self.team.failed.wait()  # bounded: cancelled at shutdown
        self._tell_engines(self.addresses())

    def _tell_engines(self, addresses: EnvironmentAddresses) -> None:
        """Send addresses to all engines. Does not wait: a lost or hung engine is handled by its team, and its
        replacement gets the addresses when it starts.
        """
        for engine in (engine for team in self.engines for engine in team.named().values()):
            engine.use_environments.remote(addresses)


def engine_name(engine: Any) -> str:
    """Return the name of an engine's actor, in its episodes' names. It never reaches the policy."""
    name: str = engine._actor_id.hex()
    return name


_END_S = 0.05  # time to collect ends of episodes for one call


class EnvironmentCalls:
    """Batches an engine's calls to one environment worker, on one event loop. If the worker is lost, every
    `act` of a call raises; an error of one action is raised only by its `act`.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._acts: list[tuple[Act, asyncio.Future[Observed | None]]] = []
        self._begins: list[ActingEpisode] = []
        self._ends: list[str] = []
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, episode: ActingEpisode) -> None:
        """Announce that an episode will act, so that its process starts meanwhile. Does not wait."""
        if not self._begins:
            asyncio.get_running_loop().call_soon(self._send_begins)
        self._begins.append(episode)

    async def act(self, act: Act) -> Observed:
        """Give an action to its environment; return the answer."""
        loop = asyncio.get_running_loop()
        if not self._acts:
            loop.call_soon(self._send)  # after the other episodes that act now
        answer: asyncio.Future[Observed | None] = loop.create_future()
        self._acts.append((act, answer))
        observed: Observed | None = await answer
        if observed is None:  # slow, and not the only action of the call
            observed = await self._worker.answer.remote(act.episode.name)
        return observed

    def end(self, episode: str) -> None:
        """End an episode soon. Does not wait."""
        if not self._ends:
            asyncio.get_running_loop().call_later(_END_S, self._send_ends)
        self._ends.append(episode)

    def _send_begins(self) -> None:
        begins, self._begins = self._begins, []
        self._worker.prepare.remote(begins)

    def _send_ends(self) -> None:
        ends, self._ends = self._ends, []
        self._worker.end.remote(ends)

    def _send(self) -> None:
        acts, self._acts = self._acts, []
        call = asyncio.create_task(self._exchange(acts), name=f"answers to {len(acts)} actions")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _exchange(self, acts: Sequence[tuple[Act, asyncio.Future[Observed | None]]]) -> None:
        try:
            observed = await self._worker.act.remote([act for act, _ in acts])
        except Exception as error:
            for _, answer in acts:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), observation in zip(acts, observed, strict=True):
            if not answer.done():  # its episode may have been abandoned
                answer.set_result(observation)
