"""Room in a cluster that is a run's own while it lasts: one placement group, taken whole or not at all.

    policy ranks   one bundle each, next to each other; those on whose GPUs one engine takes turns, together
    engines        one bundle each, so that one that is spread over GPUs has them on one node
    all others     one bundle each

An actor that is replaced comes into the bundle of the one before; bundles of a node that is lost move to
another when there is room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.placement.demands import Demand
from actors.placement.fitting import Bundle, Node, bundles, grown, no_room, too_large
from grpo_dist.config import Config
from grpo_dist.errors import UserError

logger = logging.getLogger("grpo_dist")

_LOOK_S = 0.5
_FIRST_S = 2.0  # of waiting are not worth a line
_TELL_S = 30.0  # between two lines about it


class Room:
    """Made by `take`; empty where nothing is reserved."""

    def __init__(self, wanted: list[Bundle], group: PlacementGroup | None) -> None:
        self._wanted, self._group = wanted, group

    @classmethod
    async def take(cls, config: Config, demands: dict[str, Demand]) -> Room:
        """Waits until there is room, for `cluster.timeouts.room_s` at most. Raises UserError with what was
        asked for, what each node has, and what would fit.
        """
        wanted = bundles(demands)
        if not wanted:
            return cls([], None)
        if problem := too_large(wanted, expected(config)):
            raise UserError(f"cluster: {problem}")
        group = placement_group(
            [_resources(bundle) for bundle in wanted], strategy="PACK", name=f"grpo-dist-{config.name}"
        )
        room = cls(wanted, group)
        try:
            await room._given(config)
        except BaseException:
            room.give_back()
            raise
        return room

    @property
    def is_held(self) -> bool:
        """Whether anything is reserved."""
        return self._group is not None

    async def whole(self, config: Config) -> None:
        """Waits until there is all of it: Ray places anew what was on a node that is lost. Raises as
        `take`.
        """
        await self._given(config)

    def of(self, role: str) -> list[dict[str, Any]] | None:
        """Ray options of each worker of ``role``; None: nothing is reserved for them."""
        if self._group is None:
            return None
        places = [
            {
                "num_gpus": bundle.gpus // bundle.workers,
                "num_cpus": bundle.cpus // bundle.workers,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
            }
            for index, bundle in enumerate(self._wanted)
            if bundle.role == role
            for _ in range(bundle.workers)
        ]
        return places or None

    def give_back(self) -> None:
        """Whoever is in it still is ended by Ray; safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    async def _given(self, config: Config) -> None:
        assert self._group is not None
        limit_s, begin, tell_s = config.cluster.timeouts.room_s, time.monotonic(), _FIRST_S
        while placement_group_table(self._group)["state"] != "CREATED":
            waited = time.monotonic() - begin
            if waited > limit_s:
                raise no_room(config, self._wanted, nodes(), limit_s)
            if waited > tell_s:
                logger.warning("waiting for room in the cluster (%d of %d s): %s", waited, limit_s, _free())
                tell_s = waited + _TELL_S
            await asyncio.sleep(_LOOK_S)


def nodes() -> list[Node]:
    """Those that are alive, and what they have."""
    # Ray has no public way to what is free on each node but its dashboard, which need not be there.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Node(
            node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def expected(config: Config) -> list[Node]:
    """`nodes`, and those that an autoscaler adds."""
    return grown(nodes(), config.cluster.grows_to)


def _free() -> str:
    return "; ".join(map(str, nodes()))


def _resources(bundle: Bundle) -> dict[str, float]:
    return {name: n for name, n in (("GPU", bundle.gpus), ("CPU", bundle.cpus)) if n}
