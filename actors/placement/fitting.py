"""Check whether a run fits on a cluster's current nodes.

A run reserves all its devices or none: no deadlock between half-placed jobs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.placement.demands import Demand, fewer_workers, whole_gpus
from grpo_dist.config import AutoscalingConfig, ClusterConfig
from grpo_dist.errors import UserError


@dataclass(frozen=True)
class Node:
    """A node's address (``name``), its resources, and which of them are free."""

    name: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float

    def __str__(self) -> str:
        gpus = f"{self.free_gpus:g} of {self.gpus:g} GPU(s) and " if self.gpus else ""
        return f"{self.name}: {gpus}{self.free_cpus:g} of {self.cpus:g} CPU(s) free"


@dataclass(frozen=True)
class Bundle:
    """Devices on one node for one worker, or for several ``workers`` that share them. ``shares``: index and
    GPUs of each worker, if a role's workers differ. ``adjacent``: how many successive bundles of this size
    are best on one node.
    """

    role: str
    gpus: int
    cpus: int
    workers: int = 1
    shares: tuple[tuple[int, float], ...] = ()
    adjacent: int = 1

    def __str__(self) -> str:
        parts = [f"{n} {what}(s)" for n, what in ((self.gpus, "GPU"), (self.cpus, "CPU")) if n]
        return " and ".join(parts)


def bundles(demands: dict[str, Demand]) -> list[Bundle]:
    """Return the bundles of all workers that need a reservation.

    Policy ranks come first: they communicate most, so they choose nodes first (`reservation.assigned`).
    """
    requested = []
    for role in ["policy", *(role for role in demands if role != "policy")]:
        demand = demands.get(role)
        if demand is None or demand.shared or not (demand.cpus or demand.gpus):
            continue
        if demand.each:
            requested += _shared_bundles(role, demand)
            continue
        for together in _bundle_sizes(role, demands):
            gpus, cpus = together * demand.gpus, together * demand.cpus
            adjacent = math.lcm(demand.adjacent, together) // together
            requested.append(Bundle(role, gpus, cpus, together, adjacent=adjacent))
    return requested


def _shared_bundles(role: str, demand: Demand) -> list[Bundle]:
    """Return a bundle for each group of workers that share a GPU, and for each worker with whole GPUs."""
    shares = [tuple((i, demand.each[i]) for i in together) for together in demand.together()]
    return [
        Bundle(
            role, whole_gpus(gpus for _, gpus in workers), len(workers) * demand.cpus, len(workers), workers
        )
        for workers in shares
    ]


def _bundle_sizes(role: str, demands: dict[str, Demand]) -> list[int]:
    """Return the workers per bundle of ``role``: ranks that share one engine's GPUs must be on one node."""
    rollout, workers = demands.get("rollout"), demands[role].workers
    if role != "policy" or rollout is None or not rollout.shared or not rollout.gpus:
        return [1] * workers
    return [rollout.gpus] * rollout.workers + [1] * (workers - rollout.gpus * rollout.workers)


def grown(nodes: Sequence[Node], to: AutoscalingConfig | None) -> list[Node]:
    """Return ``nodes`` plus the nodes that an autoscaler can add."""
    if to is None:
        return list(nodes)
    existing = sum(node.gpus >= to.gpus for node in nodes)
    added = Node("an added node", to.cpus, to.gpus, to.cpus, to.gpus)
    return [*nodes, *[added] * (to.nodes - existing)]


def fits(wanted: Sequence[Bundle], nodes: Sequence[Node]) -> bool:
    """Return whether all bundles fit at once: largest first, each on the fullest node with room."""
    free = [[node.free_gpus, node.free_cpus] for node in nodes]
    for bundle in sorted(wanted, key=lambda b: (-b.gpus, -b.cpus)):
        takes = [node for node in free if node[0] >= bundle.gpus and node[1] >= bundle.cpus]
        if not takes:
            return False
        chosen = min(takes)
        chosen[0] -= bundle.gpus
        chosen[1] -= bundle.cpus
    return True


def too_large(wanted: Sequence[Bundle], nodes: Sequence[Node]) -> str | None:
    """Return why waiting cannot help; None: it can. Either no node is large enough for a worker, or there are
    enough GPUs in total, but not on single nodes.
    """
    for bundle in wanted:
        if not any(node.gpus >= bundle.gpus and node.cpus >= bundle.cpus for node in nodes):
            who = f"a worker of `{bundle.role}` takes"
            if bundle.workers > 1 and bundle.shares:
                who = f"{bundle.workers} workers of `{bundle.role}`, which share a GPU, take"
            elif bundle.workers > 1:
                who = f"{bundle.workers} workers of `{bundle.role}`, on whose GPUs one engine samples, take"
            return f"{who} {bundle} of one node, and none has as much:\n" + "\n".join(
                f"  {node}" for node in nodes
            )
    empty = [replace(node, free_gpus=node.gpus) for node in nodes]
    if not fits([replace(bundle, cpus=0) for bundle in wanted if bundle.gpus], empty):
        wide = max(wanted, key=lambda bundle: bundle.gpus)
        count = sum((bundle.role, bundle.gpus) == (wide.role, wide.gpus) for bundle in wanted)
        return (
            f"its nodes have no room for {count} times {wide.gpus} GPUs of one node each (`{wide.role}`) "
            "in addition to the others, even without other jobs; use more nodes, or another "
            "`tensor_parallel_size`:\n" + "\n".join(f"  {node}" for node in nodes)
        )
    return None


def no_room(wanted: Sequence[Bundle], nodes: Sequence[Node], cluster: ClusterConfig) -> UserError:
    """Return an error with the request, each node's resources, and the remedies."""
    waited_s = cluster.timeouts.placement_timeout_s
    counts = Counter((bundle.role, str(bundle)) for bundle in wanted)
    lines = [
        f"cluster: no room for this run within `cluster.timeouts.placement_timeout_s` = {waited_s:g} s; "
        "it asks for",
        *(f"  {role}: {count} x {each}" for (role, each), count in counts.items()),
        "and has",
        *(f"  {node}" for node in nodes),
    ]
    to = cluster.grows_to
    if to and len(grown(nodes, to)) > len(nodes):
        lines.append(
            f"It has not grown to {to.nodes} node(s) with {to.gpus} GPU(s) and {to.cpus} CPU(s) each, as "
            "`cluster.grows_to` promises; see the autoscaler's messages (`ray status`), or raise the deadline"
        )
    elif fits(wanted, nodes):
        lines.append("There is room for it now: start it again")
    else:
        workers = Counter[str]()
        for bundle in wanted:
            workers[bundle.role] += bundle.workers
        lower = " or ".join(fewer_workers(workers))
        lines.append((f"Lower {lower}, wait" if lower else "Wait") + " for other jobs, or add nodes")
    return UserError("\n".join(lines))
