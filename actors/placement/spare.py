"""Nodes with room for one more actor, and nodes that are about to go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import ray


def draining() -> dict[str, float]:
    """Return the nodes that Ray was asked to drain, by node id, with the seconds that each still has;
    infinity where no deadline was given.
    """
    # Ray has no public interface to this; its own Serve reads it in the same way.
    from ray._private.state import state

    now = time.time()
    known = state.get_draining_nodes()
    return {node: max(0.0, at_ms / 1000 - now) if at_ms else float("inf") for node, at_ms in known.items()}


def cores_in_use(
    nodes: Mapping[str, Sequence[str]], threads: Mapping[str, int], *, in_turns: bool
) -> dict[str, int]:
    """Return for each node the cores on which the run's own actors compute though Ray has them as free.

    ``nodes``: by role, the node of each actor; ``threads``: of one actor of each role; ``in_turns``: engines
    and policy ranks compute one after the other.
    """
    used = {
        role: Counter({n: c * threads[role] for n, c in Counter(own).items()}) for role, own in nodes.items()
    }
    engines, ranks = used.pop("rollout", Counter()), used.pop("policy", Counter())
    first = engines | ranks if in_turns else engines + ranks  # | takes the larger of each
    return dict(sum(used.values(), first))


def rooms(cpus: float, gpus: float, count: int, *, in_use: Mapping[str, float]) -> list[str]:
    """Return the ids of nodes for up to ``count`` actors that take ``cpus`` and ``gpus`` of one node each; a
    node with room for several stands there several times. The fullest node comes first. ``in_use``: see
    `cores_in_use`.
    """
    # See `reservation.nodes`.
    from ray._private.state import available_resources_per_node

    free, going = available_resources_per_node(), draining()
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in going]
    has = {
        node: (free.get(node, {}).get("GPU", 0.0), free.get(node, {}).get("CPU", 0.0) - in_use.get(node, 0.0))
        for node in alive
    }
    return pick(has, cpus, gpus, count)


def pick(has: dict[str, tuple[float, float]], cpus: float, gpus: float, count: int) -> list[str]:
    """See `rooms`. ``has``: free GPUs and CPUs of each node."""
    chosen: list[str] = []
    for node, (free_gpus, free_cpus) in sorted(has.items(), key=lambda item: (item[1], item[0])):
        while len(chosen) < count and free_gpus >= gpus and free_cpus >= cpus:
            chosen.append(node)
            free_gpus, free_cpus = free_gpus - gpus, free_cpus - cpus
    return chosen
