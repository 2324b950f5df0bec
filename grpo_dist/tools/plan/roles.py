"""Assigns the devices of a planned cluster to roles, with the placement of a real run."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.models import ModelShape

_CPUS_PER_GPU = 12  # assumed for nodes with GPUs


@dataclass(frozen=True, slots=True)
class Roles:
    """``gpus``: in use. The threads of an engine and of a policy rank matter where there are no GPUs."""

    colocated: bool
    gpus: int
    engine_threads: int
    policy_threads: int
    words: str


def roles_of(config: Config, model: ModelShape, cluster: ClusterShape, *, cpus: int | None = None) -> Roles:
    """Place the roles of ``config``. ``cpus``: of a machine without GPUs. Raises UserError for a misfit."""
    from actors.placement.demands import Resources, describe, is_colocated, placement
    from actors.placement.fitting import Node, bundles, too_large

    has = Resources(cpus or max(1, cluster.gpus * _CPUS_PER_GPU), cluster.gpus)
    demands = placement(config, has, training=True)
    if cluster.gpus:
        _check_shapes(config, model, cluster)
        gpus, cores = cluster.gpus_per_node, _CPUS_PER_GPU * cluster.gpus_per_node
        nodes = [Node(f"node {i + 1}", cores, gpus, cores, gpus) for i in range(cluster.nodes)]
        if problem := too_large(bundles(demands), nodes):
            raise UserError(f"{cluster}: {problem.partition(':')[0]}")
    used = sum(d.workers * d.gpus for d in demands.values() if not d.shared)
    rollout, policy = demands["rollout"], demands["policy"]
    colocated = is_colocated(config, has)
    return Roles(colocated, used, rollout.threads, policy.threads, describe(demands, has))


def _check_shapes(config: Config, model: ModelShape, cluster: ClusterShape) -> None:
    tensor_parallel, shared = config.rollout.tensor_parallel_size, config.policy.sequence_parallel
    if tensor_parallel > cluster.gpus_per_node:
        raise UserError(
            f"`rollout.tensor_parallel_size` = {tensor_parallel}: an engine lies on one node, and a node of "
            f"{cluster} has {cluster.gpus_per_node} GPUs; use at most that"
        )
    for key, value in (
        ("rollout.tensor_parallel_size", tensor_parallel),
        ("policy.sequence_parallel", shared),
    ):
        if model.shape.heads % value:
            raise UserError(
                f"`{key}` = {value} does not divide the {model.shape.heads} attention heads of {model.name}; "
                "use a divisor of them"
            )
