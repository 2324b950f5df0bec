"""Placement of a plan's roles on devices, and whether their memory fits.

Colocated roles use the same GPUs one at a time:

    engines              engine                                     + each sleeping role's remainder
    reward model         its whole copy and a forward pass          + each sleeping role's remainder
    reference            its whole copy and a forward pass          + each sleeping role's remainder
    policy               as on separate GPUs                        + each sleeping role's remainder
    weight sync          the policy's weights, the engine's weights, two buffers; two more if engines on
                         separate GPUs may join, which get the weights in a separate transfer
    refresh              the policy's weights, the reference's, two buffers, and the weight sync's

While a role sleeps, the policy's states, and per GPU a copy of the reference and of each reward model, are in
host memory. Engines keep nothing there: they drop their weights, and the policy sends them again. The
buffers of a transfer are freed at its end, at the latest by the next role.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.placement.demands import Resources, describe, placement
from actors.placement.fitting import Node, bundles, too_large
from grpo_dist.config import Config, ModelConfig, PolicyConfig, RewardModelConfig, SupervisedConfig
from grpo_dist.config.engine_arguments import head_problem
from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.memory import (
    GPU_RUNTIME,
    EngineFootprint,
    Footprint,
    Sizes,
    frozen_worker,
    policy_rank,
    reference_worker,
    rollout_engine,
    states,
    with_snapshot,
)
from grpo_dist.tools.plan.models import FrozenModel, ModelShape
from grpo_dist.tools.plan.workload import Workload

USABLE = 0.95  # share of a GPU's memory that a plan may fill
SYNC, REFRESH = "weight sync", "reference refresh"  # moments with two roles on a GPU
_CPUS_PER_GPU = 12  # assumed for nodes with GPUs
_EVALUATED_AT_ONCE = 256  # sequences per evaluation engine: see `EngineSpec.make_evaluation_spec`
# GPU memory of a sleeping worker: its context, NCCL's channels, an engine's CUDA graphs; and of a sleeping
# forward-only process: its context and kernels.
ASLEEP, _FORWARD_ASLEEP = 2 * GIB, GIB * 3 // 4
_BUCKET_MB = 256  # `weight_sync.bucket_mb` on GPUs, MiB


@dataclass(frozen=True, slots=True)
class Roles:
    """``gpus``: number in use. The threads of an engine and a policy rank matter without GPUs. ``sharing``:
    roles colocated on the policy's GPUs, including the policy; empty if all are separate. ``workers``: number
    per role, teacher and reward model. ``engine_gpus``: GPUs of one engine.
    """

    gpus: int
    engine_threads: int
    policy_threads: int
    words: str
    sharing: frozenset[str]
    workers: Mapping[str, int]
    engine_gpus: int

    @property
    def reference_is_base(self) -> bool:
        """Whether policy ranks compute the reference with adapters off, without reference workers."""
        return "reference" not in self.workers


def made_roles(config: Config, has: Resources) -> Roles:
    """Return the roles of ``config`` on the devices ``has``. Raises UserError for too few."""
    demands = placement(config, has, training=True)
    rollout, policy = demands["rollout"], demands["policy"]
    shared = {role for role, demand in demands.items() if demand.shared}
    # Each model of these two is a separate role here.
    several = {
        "reward_models": [(f"reward model {m.name}", m.num_workers) for m in config.rewards.models],
        "teachers": [(f"teacher {t.name}", t.num_workers) for t in config.distillation.teachers_with_workers],
    }
    workers = {role: demand.workers for role, demand in demands.items() if role not in several}
    sharing = shared - set(several) | {"policy"} if shared else set()
    for kind, models in several.items():
        for role, count in models:
            workers[role] = policy.workers if kind in shared else count
            if kind in shared:
                sharing.add(role)
    return Roles(
        sum(d.total_gpus for d in demands.values() if not d.shared),
        rollout.threads,
        policy.threads,
        describe(demands, has),
        frozenset(sharing),
        workers,
        config.rollout.tensor_parallel_size,
    )


def roles_of(config: Config, model: ModelShape, cluster: ClusterShape, *, cpus: int | None = None) -> Roles:
    """Place the roles of ``config``. ``cpus``: of a machine without GPUs. Raises UserError for a misfit."""
    has = Resources(cpus or max(1, cluster.gpus * _CPUS_PER_GPU), cluster.gpus)
    roles = made_roles(config, has)
    if not cluster.gpus:
        return roles
    tensor_parallel = config.rollout.tensor_parallel_size
    if tensor_parallel > cluster.gpus_per_node:
        raise UserError(
            f"`rollout.tensor_parallel_size` = {tensor_parallel}: an engine lies on one node, and a node of "
            f"{cluster} has {cluster.gpus_per_node} GPUs; use at most that"
        )
    for key, value in (
        ("rollout.tensor_parallel_size", tensor_parallel),
        ("policy.sequence_parallel", config.policy.sequence_parallel),
    ):
        if model.shape.heads % value:
            raise UserError(
                f"`{key}` = {value} does not divide the {model.shape.heads} attention heads of {model.name}; "
                "use a divisor of them"
            )
    if problem := head_problem(tensor_parallel, model.shape.kv_heads):
        raise UserError(problem)
    gpus, cores = cluster.gpus_per_node, _CPUS_PER_GPU * cluster.gpus_per_node
    nodes = [Node(f"node {i + 1}", cores, gpus, cores, gpus) for i in range(cluster.nodes)]
    if excess := too_large(bundles(placement(config, has, training=True)), nodes):
        raise UserError(f"{cluster}: {excess.partition(':')[0]}")
    return roles


# Memory of all roles


def footprints(
    config: Config,
    model: ModelShape,
    sizes: Sizes,
    workload: Workload,
    roles: Roles,
    *,
    memory: int,
    frozen: Sequence[FrozenModel] = (),
) -> dict[str, Footprint]:
    """Return the memory of one worker per role, and of moments with two roles on a shared GPU. ``memory``:
    bytes of a GPU; 0: no GPUs. ``frozen``: teachers and reward models.
    """
    # Without GPUs colocation only orders the work: all roles are in the machine's memory.
    sharing = roles.sharing if sizes.gpu else frozenset()
    workers: dict[str, Footprint] = {}
    if "policy" in roles.workers:
        workers["policy"] = policy_rank(config, model, sizes, workload)
    others = asleep("rollout", sharing)
    workers["rollout"] = rollout_engine(config, model, sizes, workload, memory=memory, asleep=others)
    if "reference" in roles.workers:
        workers["reference"] = reference_worker(config.max_length, model, sizes)
    if "evaluation" in roles.workers:
        count = config.evaluation.num_workers
        decoded = {"num_workers": count, "max_num_seqs": config.rollout.max_num_seqs or _EVALUATED_AT_ONCE}
        alone = config.model_copy(update={"rollout": config.rollout.model_copy(update=decoded)})
        engine = rollout_engine(alone, model, sizes, workload, memory=memory, trains=False)
        workers["evaluation"], snapshot = with_snapshot(engine, config.policy, model, sizes, engines=count)
        if "policy" in workers:
            rank = workers["policy"]
            workers["policy"] = replace(rank, host_first=rank.host_first | snapshot)
    workers |= {m.role: frozen_worker(config.max_length, m, sizes) for m in frozen}
    return _colocated(config, model, sizes, workers, sharing) if sharing else workers


def asleep(role: str, sharing: Collection[str]) -> int:
    """Return the bytes that the other ``sharing`` roles keep on a GPU while ``role`` uses it."""
    if role not in sharing:
        return 0
    return sum(
        ASLEEP if other in ("policy", "rollout") else _FORWARD_ASLEEP for other in sharing if other != role
    )


def _colocated(
    config: Config,
    model: ModelShape,
    sizes: Sizes,
    workers: Mapping[str, Footprint],
    sharing: Collection[str],
) -> dict[str, Footprint]:
    """Return ``workers`` with sleeping roles' GPU memory, each sleeping role's host memory, and the moments
    in which two roles have weights on the GPU.
    """
    policy, reference = config.policy, config.reference
    adapters = policy.lora is not None and policy.lora.sync == "adapter"
    largest = 0 if adapters else model.embedding * sizes.itemsize
    # A transfer's two buffers: each is a bucket, or the largest parameter.
    buffers = 2 * max((config.weight_sync.bucket_mb or _BUCKET_MB) * 2**20, largest)
    colocated = dict(workers)
    for role in set(workers) & set(sharing):
        worker = workers[role]
        offloaded = {"policy": ("weights", "gradients", "optimiser"), "rollout": ()}.get(role, ("weights",))
        moved = sum(worker.parts[part] for part in offloaded)
        host = worker.host | ({"between turns": moved} if moved else {})
        sleepers = {} if role == "rollout" else {"asleep": asleep(role, sharing)}
        colocated[role] = replace(worker, parts=worker.parts | sleepers, host=host)
    weights = states(policy, model, sizes)["weights"]
    contexts = {"runtime": GPU_RUNTIME, "asleep": asleep("policy", sharing)}
    may_join = config.rollout.most_workers > config.rollout.num_workers
    parts = {
        "policy's weights": weights,
        "engine's weights": workers["rollout"].parts["weights"],
        "buckets": (2 if may_join else 1) * buffers,
        "gathered": model.embedding * sizes.itemsize if policy.zero_stage == 3 else 0,  # the largest
    }
    colocated[SYNC] = Footprint(parts | contexts)
    if "reference" in sharing and reference.refresh_every:
        copy = workers["reference"].parts["weights"]
        average = 4 * model.parameters if reference.refresh_mix < 1 and sizes.itemsize == 2 else 0
        parts = {"policy's weights": weights, "reference's weights": copy, "average": average}
        colocated[REFRESH] = Footprint(parts | {"buckets": 2 * buffers} | contexts)
    return colocated


def node_host_bytes(memory: Mapping[str, Footprint], roles: Roles, cluster: ClusterShape) -> int:
    """Return the largest host memory of workers that fit on one node's GPUs: roles may share a node.
    ``host_first`` is on the node of policy rank 0. Excludes the few GiB of each process.

    Nodes of 8 GPUs, 8 ranks of 10 GiB, engines of 4 GPUs and 50 GiB: 1 engine -> 90 GiB, 2 -> 100 GiB.
    """

    def host(role: str) -> int:
        return sum(memory[role].host.values()) if role in memory else 0

    ranks, engines, width = roles.workers["policy"], roles.workers["rollout"], roles.engine_gpus
    each = sum(host(role) for role in {"policy", *roles.sharing} - {"rollout"})  # on a GPU of the policy
    first = sum(sum(worker.host_first.values()) for worker in memory.values())
    if "rollout" in roles.sharing:  # as in `fitting.bundles`: an engine with the ranks on its GPUs
        kinds = [(engines, width, width * each + host("rollout")), (ranks - engines * width, 1, each)]
    else:
        kinds = [(ranks, 1, each), (engines, width, host("rollout"))]
    (count, gpus, size), *others = kinds
    evaluation = (roles.workers.get("evaluation", 0), width, host("evaluation"))
    kinds = [(1, gpus, size + first), (count - 1, gpus, size), *others, evaluation]
    room = cluster.gpus_per_node
    fullest = np.zeros(room + 1)  # by the number of GPUs that the workers may use
    for count, gpus, size in kinds:
        for _ in range(min(count, room // gpus)):
            fullest[gpus:] = np.maximum(fullest[gpus:], fullest[: room + 1 - gpus] + size)
    return int(fullest[-1])


# Checks that memory fits

_WHOLE_COPY = "its weights are a whole copy on one GPU; lower `reference.micro_batch_tokens`, or"
_SPLIT = "raise `policy.zero_stage` or `rollout.tensor_parallel_size`, or set cluster.placement=separate"
_REMEDIES = {
    "evaluation": "lower `rollout.gpu_memory_utilization`",
    "reference": f"{_WHOLE_COPY} use LoRA",
    SYNC: _SPLIT,
    REFRESH: _SPLIT,
}


def memory_problems(
    config: Config, memory: Mapping[str, Footprint], cluster: ClusterShape, roles: Roles
) -> list[str]:
    """Return memory problems of GPUs and nodes of ``cluster``, with remedies. Machines without GPUs are not
    checked: all workers share their memory.
    """
    if cluster.card is None:
        return []
    whole, problems = int(cluster.card.memory * USABLE), []
    reward_models = {f"reward model {model.name}": model for model in config.rewards.models}
    for role, need in memory.items():
        reward_model = reward_models.get(role)
        share = reward_model.gpu_share if reward_model and not roles.sharing else 1.0
        limit = int(share * whole)
        if role == "rollout" or need.total <= limit:
            continue
        needs = "both together need" if role in (SYNC, REFRESH) else "a worker needs"
        has = "has" if share == 1 else f"with `gpu_share` = {share:g} has"
        if reward_model:
            remedy = _reward_model_remedy(reward_model)
        elif role == "policy":
            remedy = _policy_remedy(config.model, config.policy)
        else:
            remedy = _REMEDIES.get(role, f"{_WHOLE_COPY} use a smaller one")
        problems.append(
            f"{role}: {needs} {need.total / GIB:.1f} GiB and a {cluster.card.name} {has} {limit / GIB:.1f} "
            f"GiB for it; {remedy}"
        )
    engine = memory["rollout"]
    assert isinstance(engine, EngineFootprint)
    if engine.longest < 1:
        problems.append(
            f"rollout: {max(0, engine.cache) / GIB:.1f} GiB are left for the key-value cache, and one "
            f"sequence of {config.max_length:,} tokens takes "
            f"{config.max_length * engine.token_bytes / GIB:.1f} GiB; raise "
            "`rollout.tensor_parallel_size` or `rollout.gpu_memory_utilization`"
        )
    host_need, available = node_host_bytes(memory, roles, cluster), cluster.host
    if host_need > available:
        offload = config.policy.offload
        remedies = {
            "set cluster.placement=separate": roles.sharing,
            "take back some of `policy.offload`": "cpu" in (offload.optimizer, offload.parameters),
            "set checkpoint.background=false": config.checkpoint.background,
            "set weight_sync.deltas=false": config.weight_sync.deltas is True,
            "set rollout.speculation=null": config.rollout.speculation,
            "set evaluation.num_workers=0": config.evaluation.num_workers,
        }
        ways = [*(remedy for remedy, helps in remedies.items() if helps), "or add nodes"]
        has = "has" if cluster.is_measured else "is assumed to have"
        problems.append(
            f"host memory: the workers of one node keep {host_need / GIB:,.0f} GiB there, and a node of "
            f"{cluster} {has} {available / GIB:,.0f} GiB; {', '.join(ways).removeprefix('or ')}"
        )
    return problems


def cold_start_problem(need: Footprint, cluster: ClusterShape) -> str | None:
    """Return why the cold start does not fit on a GPU of ``cluster``, and the remedy."""
    if (limit := _too_much(need, cluster)) is None:
        return None
    return (
        f"cold start: {need.total / GIB:.1f} GiB on one GPU, and a {limit} for it; lower `sft.batch_size` or "
        "`sft.max_length`, or make it an sft stage of a pipeline, which trains on the ranks of `policy`"
    )


def supervised_problem(config: SupervisedConfig, need: Footprint, cluster: ClusterShape) -> str | None:
    """Return why a rank of an sft stage does not fit on a GPU of ``cluster``, and the remedy."""
    if (limit := _too_much(need, cluster)) is None:
        return None
    return (
        f"supervised training: a policy rank needs {need.total / GIB:.1f} GiB and a {limit} for it; "
        f"{_policy_remedy(config.model, config.policy)}"
    )


def _too_much(need: Footprint, cluster: ClusterShape) -> str | None:
    """Return what a GPU of ``cluster`` has, if ``need`` is more: "H100 has 75.7 GiB"."""
    if cluster.card is None or need.total <= (limit := int(cluster.card.memory * USABLE)):
        return None
    return f"{cluster.card.name} has {limit / GIB:.1f} GiB"


def _policy_remedy(settings: ModelConfig, policy: PolicyConfig) -> str:
    steps = [] if settings.gradient_checkpointing else ["set `model.gradient_checkpointing`=true"]
    steps.append("lower `batch.micro_batch_tokens`")
    steps += ["raise `policy.zero_stage`"] if policy.zero_stage < 3 else []
    return f"{', '.join(steps)}, or add policy ranks or `policy.sequence_parallel`"


def _reward_model_remedy(model: RewardModelConfig) -> str:
    narrower = ", set its `dtype`=bfloat16" if model.dtype == "float32" else ""
    more = "raise its `gpu_share`" if model.gpu_share < 1 else "raise its `tensor_parallel_size`"
    return f"lower its `micro_batch_tokens`{narrower}, {more}, or use a smaller model"
