"""Assigns the devices of a planned cluster to roles, with the placement of a real run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actors.placement.demands import Resources, describe, is_colocated, placement
from actors.placement.fitting import Node, bundles, too_large
from grpo_dist.config import Config, PolicyConfig, RolloutConfig
from grpo_dist.config.engine_arguments import head_problem
from grpo_dist.errors import UserError
from grpo_dist.tools.plan import teachers
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.models import ModelShape
from grpo_dist.tools.plan.reward_models import role_of

_CPUS_PER_GPU = 12  # assumed for nodes with GPUs


@dataclass(frozen=True, slots=True)
class Roles:
    """``gpus``: in use. The threads of an engine and of a policy rank matter where there are no GPUs.
    ``sharing``: the roles that take turns on the policy's GPUs, itself included; empty where each has its
    own. ``workers``: of each role, and of each reward model.
    """

    colocated: bool
    gpus: int
    engine_threads: int
    policy_threads: int
    words: str
    sharing: frozenset[str]
    workers: Mapping[str, int]

    @property
    def reference_is_base(self) -> bool:
        """True where no worker has the reference: the policy ranks compute it with their adapters off."""
        return "reference" not in self.workers


def made_roles(config: Config, has: Resources) -> Roles:
    """Return the roles of ``config`` on devices of which ``has`` are there. Raises UserError for too few."""
    demands = placement(config, has, training=True)
    rollout, policy = demands["rollout"], demands["policy"]
    shared = {role for role, demand in demands.items() if demand.shared}
    several = {"reward_models", "teachers"}  # each of them is a role of its own here
    workers = {role: demand.workers for role, demand in demands.items() if role not in several}
    for model in config.rewards.models:
        turns = policy if "reward_models" in shared else None
        workers[role_of(model)] = turns.workers if turns else model.num_workers
    for teacher in config.distillation.of_own_models:
        turns = policy if "teachers" in shared else None
        workers[teachers.role_of(teacher)] = turns.workers if turns else teacher.num_workers
    sharing = shared - several | {"policy"} if shared else set()
    if "reward_models" in shared:
        sharing |= {role_of(model) for model in config.rewards.models}
    if "teachers" in shared:
        sharing |= {teachers.role_of(teacher) for teacher in config.distillation.of_own_models}
    return Roles(
        is_colocated(config, has),
        sum(d.total_gpus for d in demands.values() if not d.shared),
        rollout.threads,
        policy.threads,
        describe(demands, has),
        frozenset(sharing),
        workers,
    )


def roles_of(config: Config, model: ModelShape, cluster: ClusterShape, *, cpus: int | None = None) -> Roles:
    """Place the roles of ``config``. ``cpus``: of a machine without GPUs. Raises UserError for a misfit."""
    has = Resources(cpus or max(1, cluster.gpus * _CPUS_PER_GPU), cluster.gpus)
    roles = made_roles(config, has)
    if cluster.gpus:
        _check_shapes(config.policy, config.rollout, model, cluster)
        gpus, cores = cluster.gpus_per_node, _CPUS_PER_GPU * cluster.gpus_per_node
        nodes = [Node(f"node {i + 1}", cores, gpus, cores, gpus) for i in range(cluster.nodes)]
        if problem := too_large(bundles(placement(config, has, training=True)), nodes):
            raise UserError(f"{cluster}: {problem.partition(':')[0]}")
    return roles


def _check_shapes(
    policy: PolicyConfig, rollout: RolloutConfig, model: ModelShape, cluster: ClusterShape
) -> None:
    tensor_parallel, shared = rollout.tensor_parallel_size, policy.sequence_parallel
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
    if problem := head_problem(tensor_parallel, model.shape.kv_heads):
        raise UserError(problem)
