"""What every role of a run takes of a cluster, and whether the cluster has it. Nothing is started here."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_dist.config import Config
from grpo_dist.errors import UserError


@dataclass(frozen=True)
class Resources:
    """What a cluster has in all."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Demand:
    """Devices a role takes: ``workers`` actors with ``gpus`` each, or the CPU threads each may use."""

    workers: int
    gpus: int
    threads: int


def placement(config: Config, has: Resources, *, training: bool) -> dict[str, Demand]:
    """What every role takes. Raises UserError naming the role and the remedy where ``has`` is not enough."""
    on_gpu = 1 if has.gpus else 0
    # Sampling and training take turns when nothing runs ahead; otherwise each gets half of the CPUs.
    share = has.cpus if config.max_staleness == 0 or not training else max(1, has.cpus // 2)
    rollout, policy, reference = config.rollout, config.policy, config.reference
    demands = {
        "rollout": Demand(
            rollout.num_workers,
            on_gpu * rollout.tensor_parallel_size,
            rollout.threads or max(1, share // rollout.num_workers),
        ),
        "rewards": Demand(config.rewards.num_workers, 0, 1),
    }
    if config.rewards.models:
        workers = sum(model.num_workers for model in config.rewards.models)
        demands["reward_models"] = Demand(workers, on_gpu, 1)
    if training:
        demands["policy"] = Demand(
            policy.num_workers, on_gpu, policy.threads or max(1, share // policy.num_workers)
        )
    if training and config.needs_reference:
        demands["reference"] = Demand(reference.num_workers, on_gpu, reference.threads or 1)
    if has.gpus:
        _check_gpus(demands, has.gpus)
    else:
        _check_cpus(demands, has.cpus, config.rollout.tensor_parallel_size)
    return demands


def _check_gpus(demands: dict[str, Demand], gpus: int) -> None:
    needed = sum(d.workers * d.gpus for d in demands.values())
    if needed > gpus:
        parts = " + ".join(f"{role} {d.workers} x {d.gpus}" for role, d in demands.items() if d.gpus)
        raise UserError(
            f"cluster: {needed} GPUs are needed ({parts}) but it has {gpus}; lower `policy.num_workers`, "
            "`rollout.num_workers`, `rollout.tensor_parallel_size` or the `num_workers` of `rewards.models`, "
            "or add nodes"
        )


def _check_cpus(demands: dict[str, Demand], cpus: int, tensor_parallel_size: int) -> None:
    keys = {role: f"{role}.num_workers" for role in ("rollout", "policy", "reference")}
    keys["reward_models"] = "rewards.models[*].num_workers"
    for role, key in keys.items():
        if role in demands and demands[role].workers > cpus:
            raise UserError(
                f"`{key}` = {demands[role].workers} but the cluster has {cpus} CPUs and no GPU, "
                f"and each such worker needs at least one; use at most {cpus}"
            )
    if tensor_parallel_size > 1:
        raise UserError(
            f"`rollout.tensor_parallel_size` = {tensor_parallel_size} needs GPUs, and the cluster has none; "
            "use 1"
        )
