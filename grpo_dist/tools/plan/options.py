"""One configuration on one cluster: memory, problems and simulated times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from grpo_dist.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    PolicyConfig,
    RewardModelConfig,
    RewardsConfig,
    SpeculationConfig,
)
from grpo_dist.config.files import changed
from grpo_dist.policy.deepspeed_config import deepspeed_config
from grpo_dist.runtime.hardware import GIB, resolve_dtype
from grpo_dist.tools.plan import teachers
from grpo_dist.tools.plan.accelerators import ClusterShape, Peaks
from grpo_dist.tools.plan.engine_memory import EngineFootprint, rollout_engine, with_snapshot
from grpo_dist.tools.plan.memory import USABLE, Footprint, Sizes, policy_rank, reference_worker
from grpo_dist.tools.plan.models import ModelShape, model_of
from grpo_dist.tools.plan.rates import Rates
from grpo_dist.tools.plan.reward_models import KnownRewardModel, reward_model_worker, role_of
from grpo_dist.tools.plan.roles import Roles, roles_of
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.setting import Setting
from grpo_dist.tools.plan.sharing import REFRESH, SYNC, asleep, host_bytes, shared
from grpo_dist.tools.plan.simulation import Simulated, simulate
from grpo_dist.tools.plan.workload import Workload

_EVALUATED_AT_ONCE = 256  # sequences of an engine of evaluation: see `EngineSpec.for_evaluation`
_SIGNAL_SHARE = 0.6  # of groups under dynamic sampling: about half of the prompts of a fitting difficulty


@dataclass(frozen=True)
class Option:
    """``problems``: why it cannot run or does not fit; empty where it does."""

    config: Config
    roles: Roles
    memory: dict[str, Footprint]
    problems: list[str]
    scenario: Scenario

    @property
    def engine(self) -> EngineFootprint:
        found = self.memory["rollout"]
        assert isinstance(found, EngineFootprint)
        return found


@dataclass(frozen=True)
class Planned:
    option: Option
    simulated: Simulated


def option_of(config: Config, setting: Setting) -> Option:
    """Plan ``config`` without simulating it. Raises UserError where the cluster has too few devices."""
    cluster, model, calibration = setting.cluster, setting.model, setting.calibration
    cpus = calibration.cpus if calibration else None
    roles = roles_of(config, model, cluster, cpus=cpus)
    sizes = Sizes.of(config, gpu=cluster.card is not None, memory=_card_memory(cluster))
    judges = tuple(judge.alone() if roles.sharing else judge for judge in setting.reward_models)
    memory = footprints(
        config,
        model,
        sizes,
        setting.workload,
        roles,
        memory=_card_memory(cluster),
        reward_models=judges,
    )
    engine = memory["rollout"]
    assert isinstance(engine, EngineFootprint)
    peaks = calibration.peaks_of(roles) if calibration else Peaks.of(cluster)
    scenario = Scenario(
        config,
        Rates(config, model, sizes, peaks, setting.reached),
        setting.workload,
        capacity=max(1, engine.mean),
        sharing=roles.sharing if cluster.gpus else frozenset(),  # on processors turns move nothing
        reference_is_base=config.needs_reference and roles.reference_is_base,
        signal_share=_SIGNAL_SHARE if config.dynamic_sampling.enabled else 1.0,
        reward_models=judges,
    )
    problems = [
        *_refusals(config.model, config.policy, cluster),
        *memory_problems(config, memory, cluster, roles),
    ]
    return Option(config, roles, memory, problems, scenario)


def _refusals(settings: ModelConfig, policy: PolicyConfig, cluster: ClusterShape) -> list[str]:
    """Return what every policy rank would refuse when it starts."""
    dtype = resolve_dtype(settings.dtype, "cuda" if cluster.card else "cpu")
    try:
        deepspeed_config(policy, dtype=dtype)
    except ValueError as error:
        return [str(error)]
    return []


def planned(option: Option, *, steps: int = 4) -> Planned:
    return Planned(option, simulate(replace(option.scenario, steps=steps)))


def footprints(
    config: Config,
    model: ModelShape,
    sizes: Sizes,
    workload: Workload,
    roles: Roles,
    *,
    memory: int,
    reward_models: Sequence[KnownRewardModel] = (),
) -> dict[str, Footprint]:
    """Return the memory of one worker of each role, and of the moments in which two roles are on a shared
    GPU. ``memory``: bytes of a GPU; 0: no GPUs.
    """
    # Without GPUs turns only order the work: all roles are in the machine's memory.
    sharing = roles.sharing if sizes.gpu else frozenset()
    others = asleep("rollout", sharing)
    found: dict[str, Footprint] = {}
    if "policy" in roles.workers:
        found["policy"] = policy_rank(config, model, sizes, workload)
    found["rollout"] = rollout_engine(config, model, sizes, workload, memory=memory, asleep=others)
    if "reference" in roles.workers:
        found["reference"] = reference_worker(config.max_length, model, sizes, workload)
    if "evaluation" in roles.workers:
        count = config.evaluation.num_workers
        decoded = {"num_workers": count, "max_num_seqs": config.rollout.max_num_seqs or _EVALUATED_AT_ONCE}
        own = config.model_copy(update={"rollout": config.rollout.model_copy(update=decoded)})
        engine = rollout_engine(own, model, sizes, workload, memory=memory, trains=False)
        found["evaluation"] = with_snapshot(engine, config.policy, model, sizes, engines=count)
    for judge in reward_models:
        found[role_of(judge.settings)] = reward_model_worker(config.max_length, judge, sizes)
    for teacher in config.distillation.of_own_models if "policy" in roles.workers else ():
        own_shape = model_of(teacher.model_section(config.model), config.sft, config.seed)
        worker = teachers.teacher_worker(teacher, config.max_length, own_shape, sizes, workload)
        found[teachers.role_of(teacher)] = worker
    if not sharing:
        return found
    settings = config.policy, config.reference, config.weight_sync
    may_join = config.rollout.most_workers > config.rollout.num_workers
    return shared(*settings, model, sizes, found, sharing, may_join=may_join)


def memory_problems(
    config: Config, memory: Mapping[str, Footprint], cluster: ClusterShape, roles: Roles
) -> list[str]:
    """Return what does not fit in a GPU or in a node of ``cluster``, with remedies. Machines without GPUs are
    not checked: all workers share their memory.
    """
    if cluster.card is None:
        return []
    whole, problems = int(cluster.card.memory * USABLE), []
    shares = {role_of(model): model.gpu_share for model in config.rewards.models if not roles.sharing}
    for role, need in memory.items():
        share = shares.get(role, 1.0)
        limit = int(share * whole)
        if role != "rollout" and need.total > limit:
            having = "has" if share == 1 else f"with `gpu_share` = {share:g} has"
            problems.append(
                f"{role}: {_needs(role)} {need.total / GIB:.1f} GiB and a {cluster.card.name} {having} "
                f"{limit / GIB:.1f} GiB for it; {_remedy(role, config.model, config.policy, config.rewards)}"
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
    needed, has = node_host_bytes(memory, roles, cluster), cluster.host
    if needed > has:
        remedy = _host_remedy(config.checkpoint, config.rollout.speculation, roles)
        problems.append(
            f"host memory: the workers of one node keep {needed / GIB:,.0f} GiB there, and a node of "
            f"{cluster} is assumed to have {has / GIB:,.0f} GiB; {remedy}"
        )
    return problems


def node_host_bytes(memory: Mapping[str, Footprint], roles: Roles, cluster: ClusterShape) -> int:
    """Return the bytes that the workers of one node keep in host memory."""
    return host_bytes(memory, roles.workers, per_node=cluster.gpus_per_node)


def _needs(role: str) -> str:
    return "both together need" if role in (SYNC, REFRESH) else "a worker needs"


def _remedy(role: str, settings: ModelConfig, policy: PolicyConfig, rewards: RewardsConfig) -> str:
    if role == "policy":
        return _policy_remedy(settings, policy)
    if role == "evaluation":
        return "lower `rollout.gpu_memory_utilization`"
    if role == "reference":
        return "its weights are a whole copy on one GPU; lower `reference.micro_batch_tokens`, or use LoRA"
    if role.startswith("teacher "):
        return "its weights are a whole copy on one GPU; lower its `micro_batch_tokens`, or use a smaller one"
    if role in (SYNC, REFRESH):
        return (
            "raise `policy.zero_stage` or `rollout.tensor_parallel_size`, or set cluster.placement=separate"
        )
    model = next(model for model in rewards.models if role_of(model) == role)
    return _reward_model_remedy(model)


def _host_remedy(checkpoint: CheckpointConfig, speculation: SpeculationConfig, roles: Roles) -> str:
    first = "set cluster.placement=separate" if roles.sharing else "take back some of `policy.offload`"
    background = ", set checkpoint.background=false" if checkpoint.background else ""
    texts = ", lower `rollout.speculation.history_tokens`" if speculation.tokens else ""
    return f"{first}{background}{texts}, or add nodes"


def _policy_remedy(settings: ModelConfig, policy: PolicyConfig) -> str:
    steps = []
    if not settings.gradient_checkpointing:
        steps.append("set `model.gradient_checkpointing`=true")
    steps.append("lower `batch.micro_batch_tokens`")
    if policy.zero_stage < 3:
        steps.append("raise `policy.zero_stage`")
    return f"{', '.join(steps)}, or add policy ranks or `policy.sequence_parallel`"


def _reward_model_remedy(model: RewardModelConfig) -> str:
    narrower = ", set its `dtype`=bfloat16" if model.dtype == "float32" else ""
    more = "raise its `gpu_share`" if model.gpu_share < 1 else "raise its `tensor_parallel_size`"
    return f"lower its `micro_batch_tokens`{narrower}, {more}, or use a smaller model"


def _card_memory(cluster: ClusterShape) -> int:
    return cluster.card.memory if cluster.card else 0


def option_or_reason(config: Config, changes: Mapping[str, Any], setting: Setting) -> Option | str:
    """Return the option with ``changes`` of dotted keys, or why it is refused or does not fit."""
    try:
        option = option_of(changed(config, changes), setting)
    except ValidationError as error:
        return "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
    except ValueError as error:
        return str(error)
    return "; ".join(option.problems) if option.problems else option
