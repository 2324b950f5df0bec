"""Watches whether nodes of the policy are about to go, so that its state is saved before.

spot notice, `ray drain-node`, an autoscaler that removes a node
every few seconds   a policy rank's node, or the driver's, is drained  -> `leaving` has it
the loop            sees it after a step, or while it waits for samples -> saves, and goes on
the node is lost    its ranks are lost                                 -> all restart from that checkpoint
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

import ray

from actors.lifecycle.calls import nodes_of, reason
from actors.lifecycle.supervisor import Team
from actors.lifecycle.watchdog import deadline_of
from actors.placement import spare
from grpo_dist.runtime.concurrency import in_thread

logger = logging.getLogger("grpo_dist")

_LOOK_S = 5.0  # between two looks at the cluster


class DrainNotice:
    """Attributes:
    leaving: those of ``nodes``, Ray's node ids, that Ray was asked to drain, at the last look.
    """

    def __init__(self, nodes: Collection[str]) -> None:
        self._nodes = frozenset(nodes)
        self.leaving: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                going = await in_thread(spare.draining)
                self.leaving = self._nodes.intersection(going)
            except Exception as error:  # Ray may fail for a moment
                logger.warning("the notices of nodes are unknown now (%s)", reason(error))
            await asyncio.sleep(_LOOK_S)


async def leaving_nodes(team: Team, timeout_s: float) -> Callable[[], frozenset[str]]:
    """Watch the nodes of the actors of ``team``, which are idle now, and the driver's, until the team ends.

    Returns a function that returns those that are about to go. Raises TimeoutError where an actor does not
    answer within ``timeout_s`` seconds.
    """
    async with deadline_of(team.named(), timeout_s, "start: where the policy's ranks are"):
        nodes = await nodes_of(team.alive())
    notice = DrainNotice([*nodes, ray.get_runtime_context().get_node_id()])
    team.oversee(notice.run())
    return lambda: notice.leaving
