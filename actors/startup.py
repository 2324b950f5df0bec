"""Wait for actors that start, and log how far those are that are not up yet.

waiting: engines 39.8 s (rollout-0: compilation 14.1 s); reference 23.7 s (reference-0)
engines: done in 48.1 s: imports 9.0 s, model 1.2 s, compilation 31.0 s, first request 1.4 s
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ray.exceptions import RayError

from actors.colocation import Colocation
from actors.lifecycle.team import Team
from actors.workers.environment import EnvironmentPool
from actors.workers.policy_group import PolicyGroup
from actors.workers.reference import ReferencePool
from actors.workers.reward import RewardModelPool, RewardPool
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.runtime.stage_log import join_names, seconds_text, stage

# By class of a role's handle: the name of its stage of the start, and what the actors do in it.
STAGES: dict[type, tuple[str, str]] = {
    RolloutPool: ("engines", "load the model, compile, and answer a first request"),
    EnvironmentPool: ("environments", "start their sandbox"),
    RewardPool: ("reward workers", "start grader processes"),
    RewardModelPool: ("reward models", "load"),
    ReferencePool: ("reference and teachers", "load their models"),
    PolicyGroup: ("policy ranks", "join, load the model and set up DeepSpeed"),
}
_ASK_S = 2.0  # between two questions to an actor how far it is


async def wait_until_ready(handle: Any) -> None:
    """Wait for the actors of one role, as a stage of the log."""
    named = (words for kind, words in STAGES.items() if isinstance(handle, kind))
    name, what = next(named, ("actors", ""))
    if isinstance(handle, RolloutPool) and handle.role == "evaluation":
        name = "evaluation engines"
    async with _followed([handle.team]) as progress:
        with stage(name, what, progress.current) as note:
            await handle.ready()
            note(await progress.took())


async def wait_until_ready_colocated(colocation: Colocation, handles: Sequence[Any]) -> None:
    what = "they load one after the other, on the same devices"
    async with _followed([handle.team for handle in handles]) as progress:
        with stage("engines, policy ranks and models", what, progress.current):
            await colocation.start()


class StartProgress:
    """How far the actors of ``teams`` are. ``clock``: seconds of a monotonic clock."""

    def __init__(self, teams: Sequence[Team], clock: Callable[[], float] = time.monotonic) -> None:
        self._teams, self._clock, self._begin = teams, clock, clock()
        self._phases: dict[str, tuple[tuple[str, float], ...]] = {}
        self._asked: dict[str, float] = {}

    async def follow(self, team: Team, name: str, worker: Any) -> None:
        """Ask ``worker`` again and again, until cancelled."""
        while True:
            await self._ask(team, name, worker)
            await asyncio.sleep(_ASK_S)

    def current(self) -> str:
        """Describe the phase of all actors that are not ready yet: those in the same phase together, with the
        seconds of the one that has been in it longest. The first phase is the start of their process.

        rollout-1: compilation 14.1 s, rollout-0: first request 0.3 s
        """
        groups: dict[str, list[tuple[str, float]]] = {}
        for name in sorted(name for team in self._teams for name in team.starting):
            phases, asked = self._phases.get(name), self._asked.get(name, self._begin)
            phase, seconds = ("process", 0.0) if phases is None else phases[-1] if phases else ("", 0.0)
            groups.setdefault(phase, []).append((name, seconds + self._clock() - asked))
        return ", ".join(
            join_names([name for name, _ in members])
            + (f": {phase} {seconds_text(max(seconds for _, seconds in members))}" if phase else "")
            for phase, members in groups.items()
        )

    async def took(self) -> str:
        """Return what the slowest actor took for each of its phases, "" for actors without phases."""
        named = [(team, *pair) for team in self._teams for pair in team.named().items()]
        await asyncio.gather(
            *(self._ask(*phases) for phases in named)
        )  # bounded: they have just become ready
        slowest = max(self._phases.values(), key=lambda phases: sum(s for _, s in phases), default=())
        return ", ".join(f"{phase} {seconds_text(seconds)}" for phase, seconds in slowest)

    async def _ask(self, team: Team, name: str, worker: Any) -> None:
        try:
            health = await team.ask(worker)
        except RayError:
            return  # it is lost, or cannot start, which the wait for it reports
        self._asked[name] = self._clock()
        self._phases[name] = health.phases


@asynccontextmanager
async def _followed(teams: Sequence[Team]) -> AsyncIterator[StartProgress]:
    """Follow the start of all actors of ``teams`` for the length of the block."""
    progress = StartProgress(teams)
    asking = [
        asyncio.create_task(progress.follow(team, name, worker), name=f"progress of {name}")
        for team in teams
        for name, worker in team.named().items()
    ]
    try:
        yield progress
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
