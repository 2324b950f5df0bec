"""Reserve the devices of a run as one placement group, acquired whole or not at all.

    policy ranks   one bundle each; ranks that share GPUs with one engine are in one bundle
    engines        one bundle each, so that a tensor-parallel engine has its GPUs on one node; none if
                   colocated with the policy, like the reference and reward models
    all others     one bundle each; reward models with GPU shares: one per GPU

A replacement actor gets the previous actor's bundle. Ray moves the bundles of a lost node to another node
when there is capacity. Roles that restart as a whole are assigned bundles again.

Ray chooses the node of each bundle: it sorts bundles before it fills node after node, and its sort is not
stable (https://github.com/ray-project/ray/issues/51117). `assigned` then assigns bundles to workers, so that
the policy has whole nodes. The bundles of 8 policy ranks and 8 engines on two nodes:

    bundle       0   1 ... 7   8   9 ... 15
    node         a   b ... b   b   a  ... a
    in order     ranks 0 ... 7, on a and b     engines 8 ... 15, on a and b
    assigned     ranks 0, 9 ... 15, all on a   engines 1 ... 8, all on b
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
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
from grpo_dist.config import ClusterConfig
from grpo_dist.errors import UserError


def assigned(
    wanted: Sequence[Bundle], nodes: Sequence[str], kept: Mapping[int, int] | None = None
) -> list[int]:
    """Return the index of a bundle of the same size for each of ``wanted``. Deterministic; on one node the
    indices are 0, 1, 2 ...

    Roles choose in the order of ``wanted``. Each fills node after node, and uses the fewest nodes that keep
    its `adjacent` bundles together.

    Args:
        wanted: bundles of all workers, in the order of the placement group.
        nodes: the node of each bundle of the placement group.
        kept: indices of bundles that stay assigned, by their positions in ``wanted``.

    Two ranks and two engines of one GPU each, nodes a b b a -> [0, 3, 1, 2].
    """
    indices = dict(kept or {})
    for (role, size), positions in _group(wanted, indices).items():
        used = set(indices.values())
        free = [i for i, bundle in enumerate(wanted) if _size(bundle) == size and i not in used]
        near = [nodes[index] for i, index in indices.items() if wanted[i].role == role]
        chosen = _choose(free, nodes, near, len(positions), wanted[positions[0]].adjacent)
        indices |= zip(positions, chosen, strict=True)
    return [indices[i] for i in range(len(wanted))]


def _size(bundle: Bundle) -> tuple[int, int]:
    return bundle.gpus, bundle.cpus


def _group(wanted: Sequence[Bundle], kept: Mapping[int, int]) -> dict[tuple[str, tuple[int, int]], list[int]]:
    """Group the positions of bundles by role and size, without kept bundles."""
    positions: dict[tuple[str, tuple[int, int]], list[int]] = {}
    for i, bundle in enumerate(wanted):
        if i not in kept:
            positions.setdefault((bundle.role, _size(bundle)), []).append(i)
    return positions


def _choose(
    free: Sequence[int], nodes: Sequence[str], near: Sequence[str], count: int, adjacent: int
) -> list[int]:
    """Return ``count`` of the bundles ``free``, node after node. Each ``adjacent`` successive bundles are on
    one node, except the last if no node has enough room. ``near``: nodes that the role already uses.
    """
    left: dict[str, list[int]] = {node: [] for node in near}
    for index in free:
        left.setdefault(nodes[index], []).append(index)
    chosen: list[int] = []
    for size in (adjacent, 1):
        while (needed := (count - len(chosen)) // size) and (node := _pick_node(left, near, needed, size)):
            n = size * min(needed, len(left[node]) // size)
            chosen += left[node][:n]
            left[node] = left[node][n:]
    return chosen


def _pick_node(left: Mapping[str, Sequence[int]], near: Sequence[str], needed: int, size: int) -> str | None:
    """Return the node to fill next: the smallest with ``needed`` * ``size`` bundles ``left``, nodes in
    ``near`` first, or else the largest; the first of equal nodes. None: no node has ``size`` bundles.
    """
    rooms = {node: len(free) // size for node, free in left.items() if len(free) >= size}
    enough = [node for node, room in rooms.items() if room >= needed]
    if enough:
        return min(enough, key=lambda node: (node not in near, len(left[node])))
    return max(rooms, key=lambda node: rooms[node], default=None)


logger = logging.getLogger("grpo_dist")

_POLL_S = 0.5
_QUIET_S = 2.0  # a shorter wait is not logged
_LOG_EVERY_S = 30.0


class Reservation:
    """Holds a run's placement group. Use `acquire` to create it; empty if nothing is reserved."""

    def __init__(self, wanted: list[Bundle], group: PlacementGroup | None) -> None:
        self._wanted, self._group = wanted, group
        self._indices = list(range(len(wanted)))  # index of each bundle in the group

    @classmethod
    async def acquire(cls, demands: dict[str, Demand], cluster: ClusterConfig, *, name: str) -> Reservation:
        """Reserve the devices of the run ``name``; wait at most `cluster.timeouts.placement_timeout_s`.

        Raises UserError with the request, each node's resources, and the remedies.
        """
        wanted = bundles(demands)
        if not wanted:
            return cls([], None)
        if problem := too_large(wanted, expected(cluster)):
            raise UserError(f"cluster: {problem}")
        group = placement_group(
            [_resources(bundle) for bundle in wanted], strategy="PACK", name=f"grpo-dist-{name}"
        )
        reservation = cls(wanted, group)
        try:
            await reservation.wait_ready(cluster)
        except BaseException:
            reservation.release()
            raise
        return reservation

    @property
    def is_held(self) -> bool:
        """True while there is a placement group."""
        return self._group is not None

    def is_placed(self) -> bool:
        """Ask Ray whether all bundles are placed."""
        return self._group is None or placement_group_table(self._group)["state"] == "CREATED"

    async def wait_ready(self, cluster: ClusterConfig, *, only: str | None = None) -> None:
        """Wait until Ray has placed all bundles, also after it lost a node, and assign them.

        ``only``: only this role is reassigned, among its bundles; other roles still use theirs. Does nothing
        if nothing is reserved. Raises like `acquire`.
        """
        if self._group is None:
            return
        limit_s, begin, log_s = cluster.timeouts.placement_timeout_s, time.monotonic(), _QUIET_S
        while (table := placement_group_table(self._group))["state"] != "CREATED":
            waited = time.monotonic() - begin
            if waited > limit_s:
                raise no_room(self._wanted, nodes(), cluster)
            if waited > log_s:
                logger.warning("waiting for room in the cluster (%d of %d s): %s", waited, limit_s, _free())
                log_s = waited + _LOG_EVERY_S
            await asyncio.sleep(_POLL_S)
        self._assign(table["bundles_to_node_id"], only)

    def _assign(self, homes: Mapping[int, str], only: str | None) -> None:
        kept = {
            i: index
            for i, index in enumerate(self._indices)
            if only is not None and self._wanted[i].role != only
        }
        self._indices = assigned(self._wanted, [homes[i] for i in range(len(self._wanted))], kept)

    def options(self, role: str) -> list[dict[str, Any]] | None:
        """Return the Ray options of each worker of ``role``; None: nothing is reserved for it."""
        if self._group is None:
            return None
        places: list[tuple[int, dict[str, Any]]] = []
        for bundle, index in zip(self._wanted, self._indices, strict=True):
            if bundle.role != role:
                continue
            each = [(len(places) + i, bundle.gpus // bundle.workers) for i in range(bundle.workers)]
            for worker, gpus in bundle.shares or each:
                options = {
                    "num_gpus": gpus,
                    "num_cpus": bundle.cpus // bundle.workers,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
                }
                places.append((worker, options))
        return [options for _, options in sorted(places, key=lambda place: place[0])] or None

    def release(self) -> None:
        """Release the devices; Ray ends actors that still use them. Safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


def nodes() -> list[Node]:
    """Return the live nodes and their resources."""
    # Ray's public interface to a node's free resources needs the dashboard, which may not run.
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


def expected(cluster: ClusterConfig) -> list[Node]:
    """Return `nodes` plus the nodes that an autoscaler adds."""
    return grown(nodes(), cluster.grows_to)


def _free() -> str:
    return "; ".join(map(str, nodes()))


def _resources(bundle: Bundle) -> dict[str, float]:
    return {name: n for name, n in (("GPU", bundle.gpus), ("CPU", bundle.cpus)) if n}
