"""A team of which some actors, the guests, join and leave while the others serve.

    absent --join--> created, started, caught up --> serving --leave--> finishes its groups --> absent
                       | it fails, or is lost                | it is lost
                       v                                     v
                     absent                                absent

A guest that is lost is not replaced, and costs the role no restart: its node may be gone for good. Its calls
are repeated on another actor, as those of any lost one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from ray.exceptions import RayError

from actors.lifecycle.actor_spec import ActorSpec
from actors.lifecycle.calls import kill, reason, result
from actors.lifecycle.supervisor import Team
from actors.lifecycle.watchdog import deadline_of
from grpo_dist.errors import StateLost
from grpo_dist.runtime.stage_log import say, seconds_text

logger = logging.getLogger("grpo_dist")

_POLL_S = 0.1  # while a guest that leaves finishes its groups


# What happened to guests between two steps: how many joined and left, and seconds of the slowest of each.
_NO_CHANGE = {"engines/joined": 0.0, "engines/left": 0.0, "engines/join_s": 0.0, "engines/leave_s": 0.0}


class ElasticTeam(Team):
    """See `Team`. Numbers from ``len(makers)`` on are those of guests.

    Args:
        guest: creates a guest under a name on a node, given by Ray's node id.
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
        self._nodes: dict[int, str] = {}  # of each guest
        self._leaving: set[int] = set()
        self._created = 0  # guests so far
        self._changes = dict(_NO_CHANGE)
        # Held while a guest leaves, so that no weights are on their way to it.
        self.between_syncs: AbstractAsyncContextManager[Any] = nullcontext()

    @property
    def is_whole(self) -> bool:
        """True while every reserved actor serves; guests do not count."""
        return self._failure is None and all(index >= self.reserved for index in self._replacing)

    def guests(self) -> dict[int, str]:
        """Return the node of each guest that serves or joins, by number. Those that leave are left out."""
        return {index: node for index, node in self._nodes.items() if index not in self._leaving}

    def free_places(self) -> list[int]:
        """Return the numbers that no guest has."""
        return sorted(self._absent)

    def metrics(self) -> dict[str, float]:
        """Return how many actors serve, and what happened to guests since the last call."""
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
        """Start guest ``index`` on ``node``; it serves once the returned task is done, unless it failed."""
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
        except (RayError, TimeoutError, StateLost) as error:  # StateLost: the policy's, which others notice
            self._replacing.pop(index, None)
            logger.warning("%s could not join (%s)", name, reason(error))
            self._remove(index)
            return
        seconds = time.monotonic() - begin
        self._changes["engines/joined"] += 1
        self._changes["engines/join_s"] = max(self._changes["engines/join_s"], seconds)
        say(f"{name} has joined, after {seconds_text(seconds)}")

    async def leave(self, index: int, why: str, *, within_s: float) -> None:
        """Give guest ``index`` no more groups, and end it once it has finished its own. Other actors repeat,
        with the same seeds, what it has not finished ``within_s`` seconds from now.
        """
        worker, begin = self.workers[index], time.monotonic()
        self._leaving.add(index)
        try:
            if index in self._replacing:  # its join fails, like that of any actor that dies
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
        """Return once the guest has no groups and no sync is under way, at ``end`` at the latest."""
        while self._has_work(index, worker) and time.monotonic() < end:
            await asyncio.sleep(_POLL_S)
        try:
            async with asyncio.timeout(max(_POLL_S, end - time.monotonic())), self.between_syncs:
                pass  # the removal follows with no await in between
        except TimeoutError:
            pass  # the sync is repeated without it

    def _has_work(self, index: int, worker: Any) -> bool:
        return self.is_current(index, worker) and self.load_balancer.sequences(index) > 0

    def _note_left(self, index: int, why: str, seconds: float) -> None:
        self._changes["engines/left"] += 1
        self._changes["engines/leave_s"] = max(self._changes["engines/leave_s"], seconds)
        say(f"{self._name(index)} has left ({why}), after {seconds_text(seconds)}")

    def _remove(self, index: int) -> None:
        """Make the guest absent: its process ends, and other actors repeat its unfinished calls."""
        worker = self.workers[index]
        self.load_balancer.withdraw(index)
        self.on_lost(index)
        kill([worker])
        self._absent.add(index)
        self.workers[index] = None
        del self._nodes[index]
