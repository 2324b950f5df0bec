"""Handle nodes that come and go: engines join a running job while the cluster has room, and leave before
their node does; the policy's state is saved before one of its nodes leaves.

every few seconds   a guest's node is drained     -> the guest leaves, within the node's notice
                    fewer guests than allowed     -> guests join, on nodes with room
                    reserved actors wait for room -> all guests leave
                    a policy rank's node, or the driver's, is drained (spot notice, `ray drain-node`, an
                    autoscaler)                   -> `DrainNotice.leaving` has it; the loop saves and goes on
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import ray

from actors.lifecycle.calls import deadline_of, nodes_of, reason
from actors.lifecycle.team import ElasticTeam, GuestSpec, Team
from grpo_dist.runtime.concurrency import run_in_thread


def draining() -> dict[str, float]:
    """Return the seconds until each draining node leaves, by Ray's node id; infinity without a deadline."""
    # Ray has no public interface to this; Ray Serve reads it in the same way.
    from ray._private.state import state

    now = time.time()
    deadlines = state.get_draining_nodes()
    return {
        node: max(0.0, at_ms / 1000 - now) if at_ms else float("inf") for node, at_ms in deadlines.items()
    }


def cores_in_use(
    nodes: Mapping[str, Sequence[str]], threads: Mapping[str, int], *, in_turns: bool
) -> dict[str, int]:
    """Return for each node the cores that the run's actors use although Ray counts them as free.

    ``nodes``: the node of each actor, by role; ``threads``: threads per actor, by role; ``in_turns``: engines
    and policy ranks alternate.
    """
    used = {
        role: Counter({n: c * threads[role] for n, c in Counter(actor_nodes).items()})
        for role, actor_nodes in nodes.items()
    }
    engines, ranks = used.pop("rollout", Counter()), used.pop("policy", Counter())
    first = engines | ranks if in_turns else engines + ranks  # | takes the larger of each
    return dict(sum(used.values(), first))


def rooms(cpus: float, gpus: float, count: int, *, in_use: Mapping[str, float]) -> list[str]:
    """Return a node id for each of up to ``count`` actors that take ``cpus`` and ``gpus`` of one node each; a
    node may repeat. The fullest node comes first. ``in_use``: see `cores_in_use`.
    """
    # See `reservation.nodes`.
    from ray._private.state import available_resources_per_node

    free, leaving = available_resources_per_node(), draining()
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in leaving]
    has = {
        node: (free.get(node, {}).get("GPU", 0.0), free.get(node, {}).get("CPU", 0.0) - in_use.get(node, 0.0))
        for node in alive
    }
    return pick(has, cpus, gpus, count)


def pick(has: dict[str, tuple[float, float]], cpus: float, gpus: float, count: int) -> list[str]:
    """Pick nodes, see `rooms`. ``has``: free GPUs and CPUs of each node."""
    chosen: list[str] = []
    for node, (free_gpus, free_cpus) in sorted(has.items(), key=lambda item: (item[1], item[0])):
        while len(chosen) < count and free_gpus >= gpus and free_cpus >= cpus:
            chosen.append(node)
            free_gpus, free_cpus = free_gpus - gpus, free_cpus - cpus
    return chosen


logger = logging.getLogger("grpo_dist")

_LOOK_S = 5.0  # interval of checks of the cluster
_LEAVE_S = 300.0  # maximum time for a leaving guest to finish its groups
_MARGIN_S = 5.0  # time kept from a node's notice, so that its engine ends before the node
_AGAIN_S = (30.0, 600.0)  # back-off after a failed join: initial and maximum, doubled each time


class Elasticity:
    """Changes the guests of ``team``.

    Args:
        in_use: see `cores_in_use`.
        is_placed: returns whether all reserved actors are placed, as after a lost node they are not. Called
            in a thread.
    """

    def __init__(
        self,
        team: ElasticTeam,
        guests: GuestSpec,
        is_placed: Callable[[], bool] = lambda: True,
        in_use: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._team, self._guests, self._is_placed = team, guests, is_placed
        self._in_use = in_use
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed, self._not_before = 0, 0.0  # consecutive failed joins; time of the next try

    async def run(self) -> None:
        """Check the cluster periodically until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                except Exception as error:  # Ray may fail temporarily
                    logger.warning("engines can neither join nor leave now (%s)", reason(error))
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def look(self) -> None:
        """Start the joins and leaves that the cluster's state requires."""
        leaving = await run_in_thread(draining)
        for index, node in self._team.guests().items():
            if node in leaving:
                notice_s = min(_LEAVE_S, max(0.0, leaving[node] - _MARGIN_S))
                self._start(self._team.leave(index, "its node is drained", within_s=notice_s))
                await asyncio.sleep(0)  # lets it begin, so that `guests` omits it
        guests = self._team.guests()
        if not await run_in_thread(self._is_placed):
            for index in sorted(guests):
                self._start(self._team.leave(index, "a reserved actor needs the room", within_s=0.0))
                await asyncio.sleep(0)
        elif len(guests) < self._guests.most and time.monotonic() >= self._not_before:
            await self._fill(self._guests.most - len(guests))

    async def _fill(self, missing: int) -> None:
        spec = self._guests
        places = await run_in_thread(lambda: rooms(spec.cpus, spec.gpus, missing, in_use=self._in_use))
        for index, node in zip(self._team.free_places(), places, strict=False):
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


class DrainNotice:
    """Attributes:
    leaving: the draining nodes among ``nodes`` (Ray's node ids), at the last check.
    """

    def __init__(self, nodes: Collection[str]) -> None:
        self._nodes = frozenset(nodes)
        self.leaving: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Check periodically until cancelled."""
        while True:
            try:
                self.leaving = self._nodes.intersection(await run_in_thread(draining))
            except Exception as error:  # Ray may fail temporarily
                logger.warning("the notices of nodes are unknown now (%s)", reason(error))
            await asyncio.sleep(_LOOK_S)


async def leaving_nodes(team: Team, timeout_s: float) -> Callable[[], frozenset[str]]:
    """Watch the driver's node and the nodes of ``team``, whose actors are idle now, until the team ends.

    Returns a function that returns the draining nodes. Raises TimeoutError if an actor does not answer within
    ``timeout_s`` seconds.
    """
    async with deadline_of(team.named(), timeout_s, "start: where the policy's ranks are"):
        nodes = await nodes_of(team.alive())
    notice = DrainNotice([*nodes, ray.get_runtime_context().get_node_id()])
    team.oversee(notice.run())
    return lambda: notice.leaving
