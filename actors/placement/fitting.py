"""Whether a run fits on the nodes of a cluster as they are now, and which smaller run does.

A run reserves all its devices or none, so that two jobs never wait for each other with half of theirs each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

from actors.placement.demands import Demand, Resources, placement, whole_gpus
from grpo_dist.config import (
    AutoscalingConfig,
    ClusterConfig,
    Config,
    EvaluationConfig,
    PolicyConfig,
    RolloutConfig,
)
from grpo_dist.config.files import changed
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


# Returns the run nearest to the one that waits that fits these nodes now, see `nearest`.
Nearest = Callable[[Sequence[Node]], dict[str, Any] | None]


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


def no_room(
    wanted: Sequence[Bundle], nodes: Sequence[Node], cluster: ClusterConfig, nearest: Nearest
) -> UserError:
    """Return an error with the request, what each node has, and the nearest request that would fit."""
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
        if not any(node.gpus for node in nodes):  # a run that fits on its CPUs is no help
            return UserError("\n".join(lines))
    near = nearest(nodes)
    if near:
        lines.append("There is room for " + " ".join(f"{key}={value}" for key, value in near.items()))
    elif near is None:
        lines.append("There is no room for a smaller one either; wait for other jobs, or add nodes")
    else:
        lines.append("There is room for it now: start it again")
    return UserError("\n".join(lines))


def nearest(config: Config, nodes: Sequence[Node], *, training: bool) -> dict[str, Any] | None:
    """Return the run closest to this one that fits now, as overrides; None where none does.

    Tries engines on the policy's GPUs, fewer policy ranks or engines, engines on fewer GPUs, or fewer threads
    where there are no GPUs; then, where nothing fits while sampling runs ahead, all of it without running
    ahead, on the policy's GPUs. ``training``: False for an evaluation.
    """
    # Demands follow from what the cluster has in all, free or not.
    has = Resources(
        int(sum(node.cpus for node in nodes)),
        int(sum(node.gpus for node in nodes)),
        int(max((node.cpus for node in nodes), default=0)),
        shared=True,
    )
    free = sum(node.free_gpus for node in nodes)
    on_policy: dict[str, Any] = {"max_staleness": 0, "cluster.placement": "colocated"}
    shares = training and has.gpus and config.max_staleness and config.cluster.placement == "auto"
    smaller = partial(_smaller, config.rollout, config.policy, config.is_supervised)
    for changes in chain(smaller(), (on_policy | fewer for fewer in smaller()) if shares else ()):
        if has.gpus and _least_gpus(config.rollout, config.is_supervised, changes) > free:
            continue  # a large configuration has hundreds of thousands of smaller ones
        for overrides in _likewise(config.cluster, config.evaluation, changes, has, nodes):
            try:
                wanted = bundles(placement(changed(config, overrides), has, training=training))
            except ValueError:
                continue  # refused for another reason
            if wanted and fits(wanted, nodes):  # with more threads than CPUs, none would be reserved
                return overrides
    return None


def _least_gpus(rollout: RolloutConfig, is_supervised: bool, changes: dict[str, Any]) -> int:
    """Return the GPUs of the run's engines with ``changes``, a lower bound for the run."""
    if is_supervised:
        return 0
    engines = changes.get("rollout.num_workers", rollout.num_workers)
    width = changes.get("rollout.tensor_parallel_size", rollout.tensor_parallel_size)
    return int(engines * width)


def _likewise(
    cluster: ClusterConfig,
    evaluation: EvaluationConfig,
    changes: dict[str, Any],
    has: Resources,
    nodes: Sequence[Node],
) -> Iterator[dict[str, Any]]:
    """Yield ``changes`` alone, then with further overrides that save devices."""
    yield changes
    if has.gpus and evaluation.num_workers:
        yield changes | {"evaluation.num_workers": 0}
    if has.gpus:
        if cluster.placement == "auto":
            yield changes | {"cluster.placement": "colocated"}
        return
    most = int(max((node.free_cpus for node in nodes), default=0))
    for threads in (n for n in (16, 8, 4, 2, 1) if n <= most):
        yield changes | {"rollout.threads": threads, "policy.threads": threads}


def _smaller(rollout: RolloutConfig, policy: PolicyConfig, is_supervised: bool) -> Iterator[dict[str, Any]]:
    """Yield smaller runs, the least changed first: by the logarithm of what ranks, engines and GPUs
    shrink.
    """
    ranks, engines = policy.num_workers, rollout.num_workers
    width = rollout.tensor_parallel_size
    if is_supervised:
        engines = width = 1  # it has none
    widths = [width // n for n in (1, 2, 4, 8) if width % n == 0 and width // n]
    options = product(range(1, ranks + 1), range(1, engines + 1), widths)

    def lost(option: tuple[int, int, int]) -> float:
        return sum(
            math.log(before / now) for before, now in zip((ranks, engines, width), option, strict=True)
        )

    for r, e, w in sorted(options, key=lost):
        changes = {"policy.num_workers": (r, ranks), "rollout.num_workers": (e, engines)}
        changes["rollout.tensor_parallel_size"] = (w, width)
        yield {key: now for key, (now, before) in changes.items() if now != before}
