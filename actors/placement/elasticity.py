"""Has engines join a running job while the cluster has room, and leave before their node goes.

every few seconds   a guest's node is drained     -> the guest leaves, within the node's notice
                    more serve than are wanted    -> the newest guest leaves
                    fewer                         -> guests join, on nodes with room
                    reserved actors wait for room -> all guests leave
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from actors.lifecycle.actor_spec import GuestSpec
from actors.lifecycle.calls import reason
from actors.lifecycle.elastic_team import ElasticTeam
from actors.placement import spare
from grpo_dist.runtime.concurrency import in_thread

logger = logging.getLogger("grpo_dist")

ENGINES = "engines"  # file in a run's directory with the wanted number of engines

_LOOK_S = 5.0  # between two looks at the cluster
_LEAVE_S = 300.0  # of a guest that leaves for another reason than its node, to finish its groups
_MARGIN_S = 5.0  # of a node's notice, so that its engine ends before the node
_AGAIN_S = (30.0, 600.0)  # wait after a failed join: the first, doubled each time up to the second


class Elasticity:
    """Changes the guests of ``team``.

    Args:
        wanted: how many engines there should be; it may change at any time, and is clipped to what the
            configuration allows. Called in a thread.
        in_use: see `spare.cores_in_use`.
        is_placed: whether all reserved actors have their places, which a lost node takes from them. Called in
            a thread.
    """

    def __init__(
        self,
        team: ElasticTeam,
        guests: GuestSpec,
        wanted: Callable[[], int | None],
        is_placed: Callable[[], bool] = lambda: True,
        in_use: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._team, self._guests, self._wanted, self._is_placed = team, guests, wanted, is_placed
        self._in_use = in_use
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed, self._not_before = 0, 0.0  # joins that failed in a row, and when to try again

    async def run(self) -> None:
        """Look at the cluster again and again, until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                except Exception as error:  # Ray or the file system may fail for a moment
                    logger.warning("engines can neither join nor leave now (%s)", reason(error))
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def look(self) -> None:
        """Start what the state of the cluster and the wanted number ask for."""
        going = await in_thread(spare.draining)
        for index, node in self._team.guests().items():
            if node in going:
                notice_s = min(_LEAVE_S, max(0.0, going[node] - _MARGIN_S))
                self._start(self._team.leave(index, "its node is drained", within_s=notice_s))
                await asyncio.sleep(0)  # it begins, so that `guests` no longer has it
        guests = self._team.guests()
        is_placed, wanted = await in_thread(self._is_placed), await in_thread(self._wanted)
        missing = (self._most(wanted) if is_placed else 0) - len(guests)
        if missing < 0:
            why = "fewer engines are wanted" if is_placed else "a reserved actor needs the room"
            for index in sorted(guests)[missing:]:
                self._start(self._team.leave(index, why, within_s=_LEAVE_S if is_placed else 0.0))
                await asyncio.sleep(0)
        elif missing > 0 and time.monotonic() >= self._not_before:
            await self._fill(missing)

    def _most(self, wanted: int | None) -> int:
        """Return how many guests there should be at ``wanted`` engines."""
        return (
            self._guests.most
            if wanted is None
            else min(max(0, wanted - self._team.reserved), self._guests.most)
        )

    async def _fill(self, missing: int) -> None:
        own = self._guests
        rooms = await in_thread(lambda: spare.rooms(own.cpus, own.gpus, missing, in_use=self._in_use))
        for index, node in zip(self._team.free_places(), rooms, strict=False):
            self._team.join(index, node).add_done_callback(partial(self._note_join, index))

    def _note_join(self, index: int, joined: asyncio.Task[None]) -> None:
        if index in self._team.guests():
            self._failed = 0
            return
        first, longest = _AGAIN_S
        self._not_before = time.monotonic() + min(longest, first * 2 ** min(self._failed, 10))
        self._failed += 1

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def wanted_in(path: Path) -> Callable[[], int | None]:
    """Return a function that reads the wanted number of engines from the file ``path``; None: there is no
    such file, or no number in it, which is logged once.
    """
    ignored = [""]

    def read() -> int | None:
        try:
            text = path.read_text(errors="replace").strip()[:40]
        except FileNotFoundError:
            return None
        except OSError as error:
            text = str(error)[:80]
        if text.isascii() and text.isdigit() and len(text) < 9:
            return int(text)
        if text != ignored[0]:
            logger.warning(
                "%s: %r is no number of engines; write a whole number, or delete the file", path, text
            )
            ignored[0] = text
        return None

    return read
