"""Whether a run fits on the nodes of a cluster as they are now.

A run reserves all its devices or none, so that two jobs never wait for each other with half of theirs each.
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
    """A node's address as its name, what it has, and what of that is free."""

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
    """Devices of one worker, on one node, or of several ``workers`` that share them. ``shares``: the index
    and the GPUs of each worker of a role whose workers differ. ``adjacent``: how many successive bundles
    of the size are best on one node.
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
    """Return the bundles of all workers that something is reserved for.

    Policy ranks come first: they communicate most, and are the first to choose nodes (`assignment`).
    """
    wanted = []
    for role in ["policy", *(role for role in demands if role != "policy")]:
        demand = demands.get(role)
        if demand is None or demand.shared or not (demand.cpus or demand.gpus):
            continue
        if demand.each:
            wanted += _shared_bundles(role, demand)
            continue
        for together in _sizes(role, demands):
            gpus, cpus = together * demand.gpus, together * demand.cpus
            adjacent = math.lcm(demand.adjacent, together) // together
            wanted.append(Bundle(role, gpus, cpus, together, adjacent=adjacent))
    return wanted


def _shared_bundles(role: str, demand: Demand) -> list[Bundle]:
    """Return a bundle for each group of workers that share a GPU, and for each worker with its own."""
    shares = [tuple((i, demand.each[i]) for i in together) for together in demand.together()]
    return [
        Bundle(
            role, whole_gpus(gpus for _, gpus in workers), len(workers) * demand.cpus, len(workers), workers
        )
        for workers in shares
    ]


def _sizes(role: str, demands: dict[str, Demand]) -> list[int]:
    """Return the workers of each bundle of ``role``: ranks whose GPUs one engine shares must be on one
    node.
    """
    rollout, workers = demands.get("rollout"), demands[role].workers
    if role != "policy" or rollout is None or not rollout.shared or not rollout.gpus:
        return [1] * workers
    return [rollout.gpus] * rollout.workers + [1] * (workers - rollout.gpus * rollout.workers)


def grown(nodes: Sequence[Node], to: AutoscalingConfig | None) -> list[Node]:
    """Return ``nodes`` and those that an autoscaler can add."""
    if to is None:
        return list(nodes)
    there = sum(node.gpus >= to.gpus for node in nodes)
    each = Node("an added node", to.cpus, to.gpus, to.cpus, to.gpus)
    return [*nodes, *[each] * (to.nodes - there)]


def fits(wanted: Sequence[Bundle], nodes: Sequence[Node]) -> bool:
    """Return whether all bundles fit at once: largest first, each on the fullest node that takes it."""
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
    """Return why waiting cannot help; None: it can. Either no node is large enough for a worker, or the GPUs
    suffice in all but not on single nodes.
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
    """Return an error with the request, what each node has, and what can be done."""
    waited_s = cluster.timeouts.placement_timeout_s
    asked = Counter((bundle.role, str(bundle)) for bundle in wanted)
    lines = [
        f"cluster: no room for this run within `cluster.timeouts.placement_timeout_s` = {waited_s:g} s; "
        "it asks for",
        *(f"  {role}: {count} x {each}" for (role, each), count in asked.items()),
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
