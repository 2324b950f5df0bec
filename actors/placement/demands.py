"""Compute the devices that each role needs, and check that the cluster has them. Starts nothing.

separate                               colocated
GPU 0 1 2     policy ranks             GPU 0 1 2 3 4 5 6 7   rollout engines, while they sample
GPU 3 4 5     rollout engines          GPU 0 1 2 3 4 5 6 7   a copy of each reward model, while they score
GPU 6         reward models            GPU 0 1 2 3 4 5 6 7   a copy of the reference, for its log-probs
GPU 7         the reference            GPU 0 1 2 3 4 5 6 7   policy ranks, while they train
              (a teacher likewise)
GPU 8         evaluation engine        GPU 8                 evaluation engine
GPU 9, if any engines that join        GPU 9, if any         engines that join

`actors.colocation` moves colocated GPUs from one role to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from grpo_dist.config import (
    ClusterConfig,
    Config,
    PolicyConfig,
    ReferenceConfig,
    RewardsConfig,
    RolloutConfig,
)
from grpo_dist.config.files import changed
from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import transfer_backend

_ROUNDING = 1e-6  # so that three times 1/3 is a whole GPU


class Devices(NamedTuple):
    """GPUs on one node, by the identifiers that CUDA_VISIBLE_DEVICES takes."""

    node: str
    gpus: tuple[str, ...]


def packed(gpus: Sequence[float], copies: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Group workers, by index, that share a GPU; a worker with whole GPUs is a group alone. Places the
    largest share first, on the first GPU with enough left. Among equal shares, the first copies of all models
    come first, so that copies of one model are spread over GPUs when other models can fill these.

        (0.25, 2, 0.5, 0.75, 0.5)           -> (1,), (0, 3), (2, 4)
        (0.5, 0.5, 0.5, 0.5), (0, 1, 0, 1)  -> (0, 2), (1, 3)
    """
    copies = copies or [0] * len(gpus)
    groups: list[list[int]] = []
    for i in sorted(range(len(gpus)), key=lambda i: (-gpus[i], copies[i])):
        fits = (together for together in groups if sum(gpus[j] for j in (*together, i)) <= 1 + _ROUNDING)
        together = next(fits, None)
        if together is None:
            groups.append(together := [])
        together.append(i)
    return [tuple(sorted(together)) for together in groups]


def whole_gpus(gpus: Iterable[float]) -> int:
    """Return the number of GPUs of one group of `packed`."""
    return math.ceil(sum(gpus) - _ROUNDING)


def smaller_shared(ranks: int, rollout: RolloutConfig, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield overrides with which at most ``ranks`` policy ranks, one per GPU, and the engines share at most
    ``gpus``; the most ranks first. Rank counts divide ``ranks``, so they still divide a step's samples.

        ranks 4, 4 engines, 3 GPUs -> policy.num_workers and rollout.num_workers 2, then 1
    """
    width, engines = rollout.tensor_parallel_size, rollout.num_workers
    for fewer in (n for n in range(min(ranks, gpus), 0, -1) if ranks % n == 0):
        narrower = max(n for n in range(1, 1 + min(width, fewer)) if width % n == 0)
        changes = {
            "policy.num_workers": (fewer, ranks),
            "rollout.num_workers": (min(engines, fewer // narrower), engines),
            "rollout.tensor_parallel_size": (narrower, width),
        }
        yield {key: now for key, (now, before) in changes.items() if now != before}


def share_out(rank_devices: Sequence[Devices], engines: int, tensor_parallel_size: int) -> list[Devices]:
    """Split the policy ranks' devices among ``engines``; the devices of one engine are on one node.

    Two nodes of two GPUs each, two engines of two: [a/0, b/0, a/1, b/1] -> [a/0,1  b/0,1].
    """
    by_node: dict[str, list[str]] = {}
    for node, gpus in rank_devices:
        by_node.setdefault(node, []).extend(gpus)
    size = tensor_parallel_size
    devices = [
        Devices(node, tuple(gpus[i : i + size]))
        for node, gpus in by_node.items()
        for i in range(0, len(gpus) - size + 1, size)
    ]
    if len(devices) < engines:
        ranks = ", ".join(f"{len(gpus)} on {node}" for node, gpus in by_node.items())
        raise UserError(
            f"`rollout.num_workers` = {engines} engines of `rollout.tensor_parallel_size` = {size} GPUs of "
            f"one node each: the policy's GPUs ({ranks}) have room for {len(devices)}; lower either, or set "
            "cluster.placement=separate"
        )
    return devices[:engines]


def colocated_ranks(rank_devices: Sequence[Devices], engines: Sequence[Devices]) -> list[int]:
    """Return the policy rank on the GPU of each process of ``engines``, one process per GPU."""
    ranks = {(node, gpu): rank for rank, (node, gpus) in enumerate(rank_devices) for gpu in gpus}
    return [ranks[node, gpu] for node, gpus in engines for gpu in gpus]


_COMPUTING = ("rollout", "policy", "evaluation")  # the other roles mostly wait
_NUM_WORKERS = {role: f"{role}.num_workers" for role in ("policy", "rollout", "reference", "evaluation")} | {
    "reward_models": "rewards.models[*].num_workers",
    "teachers": "distillation.teachers[*].num_workers",
}


def fewer_workers(workers: Mapping[str, int]) -> list[str]:
    """Return the keys that can lower the ``workers`` of a role; evaluation can be lowered to 0."""
    return [f"`{key}`" for role, key in _NUM_WORKERS.items() if workers.get(role, 0) > (role != "evaluation")]


@dataclass(frozen=True)
class Resources:
    """Total resources of a cluster.

    ``node_cpus``: CPUs of its largest node; None: it has one node. ``shared``: other jobs may use it, so CPUs
    are reserved, too, if there are enough.
    """

    cpus: int
    gpus: int
    node_cpus: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class Demand:
    """Devices of a role: ``workers`` actors with ``gpus`` each, or with ``threads`` CPU threads each.

    ``shared``: colocated on the policy ranks' devices, which are counted there. ``cpus``: CPUs reserved for
    each actor; 0: none. ``each``: GPUs per worker if they differ, whole ones or a share of one; (): ``gpus``
    each. ``copies``: which copy of its model each of these workers is, from 0. ``adjacent``: how many
    successive workers communicate most and are best on one node.
    """

    workers: int
    gpus: int
    threads: int
    shared: bool = False
    cpus: int = 0
    each: tuple[float, ...] = ()
    copies: tuple[int, ...] = ()
    adjacent: int = 1

    @property
    def total_gpus(self) -> int:
        """GPUs of all workers; a GPU that workers share counts once."""
        if not self.each:
            return self.workers * self.gpus
        return sum(whole_gpus(self.each[i] for i in together) for together in self.together())

    def together(self) -> list[tuple[int, ...]]:
        """Return which workers, by index, are on the same GPUs."""
        return packed(self.each, self.copies)

    def __str__(self) -> str:
        return f"{self.workers} on {self.total_gpus}" if self.each else f"{self.workers} x {self.gpus}"


def placement(config: Config, has: Resources, *, training: bool) -> dict[str, Demand]:
    """Return the demand of every role. Raises UserError with role and remedy if ``has`` is not enough."""
    colocated = training and not config.is_supervised and is_colocated(config, has)
    demands = demands_of(config, has, training=training, colocated=colocated)
    if problem := _colocation_problem(config, demands, has):
        raise UserError(problem)
    if not has.gpus:
        _check_cpus(demands, has.cpus, config.rollout.tensor_parallel_size)
    elif _gpus(demands) > has.gpus:
        raise _too_few_gpus(
            config.cluster, demands, has.gpus, _colocated_overrides(config, demands, has.gpus)
        )
    elif training and (rollout := demands.get("rollout")):  # rejects a transport that cannot connect them
        transfer_backend(config.weight_sync.backend, "cuda", one_host=True, colocated=rollout.shared)
    return demands


def _colocation_problem(config: Config, demands: Mapping[str, Demand], has: Resources) -> str | None:
    """Return why roles cannot share devices as configured, and the remedy; None: they can."""
    shared = {role for role, demand in demands.items() if demand.shared}
    if "evaluation" in demands and "reward_models" in shared:
        return (
            f"`evaluation.num_workers` = {config.evaluation.num_workers}: evaluation scores while the policy "
            "trains, but `rewards.models` are colocated with it (`cluster.placement`); set "
            "cluster.placement=separate or evaluation.num_workers=0"
        )
    if "rollout" in shared and _keeps_weights_of_joining(config):
        separate = _gpus(demands_of(config, has, training=True, colocated=False))
        return (
            f"`weight_sync.deltas` = true: engines that join (`rollout.max_workers` = "
            f"{config.rollout.max_workers}) hold the weights before, and colocated ones drop them at every "
            "update; set weight_sync.deltas=false"
            + (" or cluster.placement=separate" if separate <= has.gpus else "")
        )
    return None


def _keeps_weights_of_joining(config: Config) -> bool:
    """Return whether joining engines must keep the previous weights, which colocated engines drop."""
    return config.rollout.may_grow and config.weight_sync.deltas is True


def is_colocated(config: Config, has: Resources) -> bool:
    """Return whether the roles of a training run are colocated.

    ``auto``: with GPUs, only if there are too few for separate roles; without GPUs, if nothing is sampled
    ahead, as sampling and training alternate anyway. Raises UserError if `colocated` is set and impossible.
    """
    mode = config.cluster.placement
    problem = _not_colocated(config.rollout, config.policy.num_workers, config.rewards, config.max_staleness)
    if mode != "auto":
        if mode == "colocated" and problem:
            raise UserError(f"`cluster.placement` = colocated: {problem}")
        return mode == "colocated"
    if not has.gpus:
        return config.max_staleness == 0
    apart = demands_of(config, has, training=True, colocated=False)
    return _gpus(apart) > has.gpus and problem is None


def has_reference(policy: PolicyConfig, reference: ReferenceConfig, *, needed: bool, colocated: bool) -> bool:
    """Return whether a training run has reference workers. ``needed``: something reads their log-probs.

    A colocated policy with adapters needs none: with adapters disabled, it is the base model. This does not
    hold for a refreshed reference, which is another model.
    """
    if colocated and policy.lora is not None and not reference.refresh_every:
        return False
    return needed


def _not_colocated(
    rollout: RolloutConfig, ranks: int, rewards: RewardsConfig, max_staleness: int
) -> str | None:
    """Return why engines cannot share devices with ``ranks`` policy ranks, and the remedy; None: they can."""
    if max_staleness > 0:
        return (
            f"`max_staleness` = {max_staleness} has sampling and training at the same time, and on "
            "shared devices they alternate; set max_staleness=0 or cluster.placement=separate"
        )
    if rollout.num_workers * rollout.tensor_parallel_size > ranks:
        return (
            f"`rollout.num_workers` * `rollout.tensor_parallel_size` = {rollout.num_workers} * "
            f"{rollout.tensor_parallel_size} must be at most `policy.num_workers` = {ranks}, the GPUs they "
            "share; lower one of the former, raise the latter, or set cluster.placement=separate"
        )
    for model in rewards.models:
        if model.tensor_parallel_size > 1:
            return (
                f"`rewards.models` {model.name}: `tensor_parallel_size` = {model.tensor_parallel_size}: on "
                "shared devices each GPU has a copy of it; set it to 1, or cluster.placement=separate"
            )
    return None


def demands_of(config: Config, has: Resources, *, training: bool, colocated: bool) -> dict[str, Demand]:
    """Return the demand of every role, whether or not ``has`` is enough for all.

    A computing role gets ``threads`` of its section, or else its share of the CPUs, divided by its workers
    and at most the CPUs of the largest node:

        colocated, or an evaluation    all CPUs: the other roles wait meanwhile
        separate                       half of them each for engines and ranks
        supervised                     all of them, for the ranks

    Where CPUs are reserved, one is left to the driver, which may be a job on the cluster. Each evaluation
    engine gets one thread on top, since a share would idle between evaluations.
    """
    rollout, policy, reference = config.rollout, config.policy, config.reference
    on_gpu = 1 if has.gpus else 0
    free = has.cpus - 1 if has.shared and not has.gpus else has.cpus
    separate = training and not (colocated or config.is_supervised)
    share = max(1, free // 2) if separate else free if config.is_supervised else has.cpus
    node = has.node_cpus or has.cpus

    def threads(configured: int, workers: int) -> int:
        return configured or max(1, min(node, share // workers))

    # Without GPUs, `auto` affects only thread counts: on cores, roles need not wait for each other.
    shared = colocated and (has.gpus > 0 or config.cluster.placement == "colocated")
    on_each = policy.num_workers if shared and has.gpus else None  # copies of a frozen model, one per GPU
    ranks = Demand(
        policy.num_workers,
        on_gpu,
        threads(policy.threads, policy.num_workers),
        adjacent=policy.sequence_parallel,
    )
    if config.is_supervised:
        return _reserve_cpus({"policy": ranks}, has, colocated=colocated)
    gpus = on_gpu * rollout.tensor_parallel_size
    engine_threads = threads(rollout.threads, rollout.num_workers)
    demands = {
        "rollout": Demand(rollout.num_workers, gpus, engine_threads, shared=shared),
        "rewards": Demand(config.rewards.num_workers, 0, 1),
    }
    if training and config.evaluation.num_workers:
        demands["evaluation"] = Demand(config.evaluation.num_workers, gpus, 1)
    if config.has_environments:
        demands["environments"] = Demand(config.environments.num_workers, 0, 1)
    if config.rewards.models:
        demands["reward_models"] = _reward_model_demand(config.rewards, on_each, on_gpu, shared=shared)
    if not training:
        return _reserve_cpus(demands, has, colocated=colocated)
    demands["policy"] = ranks
    if has_reference(policy, reference, needed=config.needs_reference, colocated=shared):
        workers = on_each or reference.num_workers
        demands["reference"] = Demand(workers, on_gpu, 1, shared=shared)
    if teachers := config.distillation.teachers_with_workers:
        workers = sum(on_each or teacher.num_workers for teacher in teachers)
        demands["teachers"] = Demand(workers, on_gpu, 1, shared=shared)
    return _reserve_cpus(demands, has, colocated=colocated)


def _reward_model_demand(rewards: RewardsConfig, on_each: int | None, on_gpu: int, *, shared: bool) -> Demand:
    workers = sum(on_each or model.num_workers for model in rewards.models)
    each = tuple(model.gpus for model in rewards.models for _ in range(model.num_workers))
    copies = tuple(copy for model in rewards.models for copy in range(model.num_workers))
    if on_gpu and not on_each and set(each) != {1}:
        return Demand(workers, on_gpu, 1, shared=shared, each=each, copies=copies)
    return Demand(workers, on_gpu, 1, shared=shared)


def uncounted_threads(demands: Mapping[str, Demand]) -> dict[str, int]:
    """Return by CPU role the threads per actor on unreserved cores, which Ray counts as free."""
    computing = {role: demands[role] for role in _COMPUTING if role in demands}
    return {role: demand.threads for role, demand in computing.items() if not (demand.cpus or demand.gpus)}


def _reserve_cpus(demands: dict[str, Demand], has: Resources, *, colocated: bool) -> dict[str, Demand]:
    """Add the CPUs to reserve for each worker, if there are enough for all."""
    if has.gpus:
        cpus = {role: 0 if demand.shared else 1 for role, demand in demands.items()}
    elif has.shared and not colocated:
        cpus = {role: demands[role].threads for role in _COMPUTING if role in demands}
    else:
        cpus = {}
    enough = sum(each * demands[role].workers for role, each in cpus.items()) <= has.cpus
    return {role: replace(d, cpus=cpus.get(role, 0) if enough else 0) for role, d in demands.items()}


def _gpus(demands: Mapping[str, Demand]) -> int:
    return sum(d.total_gpus for d in demands.values() if not d.shared)


def _colocated_overrides(config: Config, demands: Mapping[str, Demand], gpus: int) -> dict[str, Any] | None:
    """Return overrides that colocate engines and policy ranks on some of ``gpus``; None: there are none."""
    rollout, evaluated = config.rollout, demands.get("evaluation")
    if not {"policy", "rollout"} <= demands.keys() or _not_colocated(
        rollout, config.policy.num_workers, config.rewards, max_staleness=0
    ):
        return None
    first: dict[str, Any] = {}
    if not demands["rollout"].shared:
        first = {"max_staleness": 0} if config.max_staleness else {}
        first |= {"weight_sync.deltas": False} if _keeps_weights_of_joining(config) else {}
        first["cluster.placement"] = "colocated"
    evaluations: list[tuple[int, dict[str, Any]]] = [(evaluated.total_gpus if evaluated else 0, {})]
    if evaluated:
        without = (0, {"evaluation.num_workers": 0})
        # Evaluation cannot score with colocated reward models.
        evaluations = [without] if "reward_models" in demands else [*evaluations, without]
    for evaluation_gpus, evaluation in evaluations:
        for fewer in smaller_shared(demands["policy"].workers, rollout, gpus - evaluation_gpus):
            with suppress(ValueError):  # the configuration rejects these overrides
                changed(config, first | evaluation | fewer)
                return first | evaluation | fewer
    return None


def _too_few_gpus(
    cluster: ClusterConfig, demands: Mapping[str, Demand], gpus: int, sharing: Mapping[str, Any] | None
) -> UserError:
    """Return the error for demands that exceed ``gpus``, with the remedies that can help. ``sharing``:
    overrides with which engines and policy ranks fit by sharing GPUs.
    """
    separate = {role: demand for role, demand in demands.items() if demand.gpus and not demand.shared}
    needed, parts = _gpus(demands), " + ".join(f"{role} {demand}" for role, demand in separate.items())
    grown = " with the nodes of `cluster.grows_to`" if cluster.grows_to else ""
    ways = ["set " + " ".join(f"{key}={value}" for key, value in sharing.items())] if sharing else []
    named_keys = sharing if sharing and demands["rollout"].shared else {}
    keys = [key for key in _fewer_gpus(separate) if key.strip("`") not in named_keys]
    if keys and sum(role != "evaluation" for role in separate) <= gpus:  # each role takes at least one GPU
        ways.append("lower " + " or ".join(keys))
    ways.append("add nodes (`cluster.grows_to`: an autoscaler does)")
    return UserError(
        f"cluster: {needed} GPUs are needed ({parts}) but it has {gpus}{grown}; {', or '.join(ways)}"
    )


def _fewer_gpus(separate: Mapping[str, Demand]) -> list[str]:
    """Return the keys that can be lowered to use fewer GPUs. ``separate``: roles with dedicated GPUs."""
    keys = fewer_workers({role: demand.workers for role, demand in separate.items()})
    if "rollout" in separate and separate["rollout"].gpus > 1:
        keys.append("`rollout.tensor_parallel_size`")
    return keys


def _check_cpus(demands: dict[str, Demand], cpus: int, tensor_parallel_size: int) -> None:
    for role, key in _NUM_WORKERS.items():
        if role in demands and demands[role].workers > cpus:
            raise UserError(
                f"`{key}` = {demands[role].workers} but the cluster has {cpus} CPUs and no GPU, "
                f"and each such worker needs at least one; use at most {cpus}, or set `cluster.grows_to` "
                "where an autoscaler adds nodes with GPUs"
            )
    if tensor_parallel_size > 1 and "rollout" in demands:
        raise UserError(
            f"`rollout.tensor_parallel_size` = {tensor_parallel_size} needs GPUs, and the cluster has none; "
            "use 1, or set `cluster.grows_to` where an autoscaler adds them"
        )


def describe(demands: dict[str, Demand], has: Resources) -> str:
    """Describe the devices of each role in one sentence."""
    parts = []
    for role, d in demands.items():
        what = f"{d} GPU(s)" if d.gpus else f"{d.workers} x {d.threads} CPU thread(s)"
        parts.append(f"{role} {what}" + (" of the policy's" if d.shared else ""))
    return f"{has.gpus} GPU(s), {has.cpus} CPU(s): {', '.join(parts)}"
