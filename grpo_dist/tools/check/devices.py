"""Checks of the placement and of the memory of every worker."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import psutil

from actors.placement.demands import Resources
from grpo_dist.config import Config, SupervisedConfig
from grpo_dist.errors import UserError
from grpo_dist.runs.trials import CheckFailed, CheckSkipped, Start, fail
from grpo_dist.runtime.hardware import GIB, DeviceType, device_type, usable_gpus
from grpo_dist.tools.plan.accelerators import ClusterShape, card_called, parse_cluster
from grpo_dist.tools.plan.memory import Footprint, Sizes, cold_start, is_trained_first, supervised_rank
from grpo_dist.tools.plan.models import ModelShape, frozen_models, model_of
from grpo_dist.tools.plan.placement import (
    Roles,
    cold_start_problem,
    footprints,
    made_roles,
    memory_problems,
    node_host_bytes,
    roles_of,
    supervised_problem,
)
from grpo_dist.tools.plan.workload import workload_of

if TYPE_CHECKING:
    from actors.connection import Fit

_PLENTY = 10**6  # of CPUs and GPUs


@dataclass(frozen=True)
class Place:
    """Where the run will be. ``cluster``: as `plan` takes it; None: this machine, or the Ray cluster that the
    configuration names.
    """

    config: Config
    cluster: str | None

    @cached_property
    def fit(self) -> Fit | UserError:
        """The placement on the cluster that the run would join now, or why it does not fit."""
        from actors.connection import fit

        try:
            return fit(self.config)
        except UserError as error:
            return error

    @cached_property
    def is_elsewhere(self) -> bool:
        """True where the configuration names a Ray cluster and this machine has no GPU: a login node, say."""
        from actors.connection import address_of

        return address_of(self.config.cluster) != "local" and device_type() == "cpu"

    @property
    def may_be_elsewhere(self) -> bool:
        return self.cluster is not None or self.is_elsewhere

    @property
    def device(self) -> DeviceType:
        """The device of the run's workers."""
        if self.cluster is not None:
            return "cuda" if parse_cluster(self.cluster).card else "cpu"
        if isinstance(self.fit, UserError):
            return device_type()
        return "cuda" if self.fit.gpus else "cpu"


def shape_of(start: Start) -> ModelShape:
    """Return the sizes of the model. Raises CheckSkipped where they are unknown."""
    try:
        return model_of(start.config.model, start.config.sft, start.config.seed)
    except UserError as error:
        why = str(error) if start.model_dir is not None else "the model cannot be read"
        raise CheckSkipped(why) from error


def check_placement(start: Start, place: Place) -> str:
    if place.cluster is None:
        if isinstance(place.fit, UserError):
            raise place.fit
        return place.fit.words
    return roles_of(start.config, shape_of(start), parse_cluster(place.cluster)).words


def check_memory(start: Start, place: Place) -> str:
    """List the memory of one worker of each role by purpose, and compare it with what there is."""
    if place.cluster is None and place.is_elsewhere:
        raise CheckSkipped("this machine has no GPU; say what the cluster has, e.g. --cluster 8x8xH100")
    config, model = start.config, shape_of(start)
    cluster = parse_cluster(place.cluster) if place.cluster else this_machine()
    card = cluster.card
    memory, roles = card.memory if card else 0, _roles(config, cluster.gpus)
    needs = footprints(
        config,
        model,
        Sizes.from_config(config, gpu=card is not None, memory=memory),
        workload_of(config, prompt_tokens=None),
        roles,
        memory=memory,
        frozen=frozen_models(config)[0],
    )
    lines = [_of_role(role, need) for role, need in needs.items()]
    wrong = memory_problems(config, needs, cluster, roles)
    first = None
    if config.sft is not None and is_trained_first(config.model, config.sft) and not start.is_cold_started:
        sizes = Sizes.from_config(config, gpu=card is not None)
        first = cold_start(config.sft, model, sizes, longest=start.longest_demonstration)
        lines.append(f"cold start, before all others: {first.total / GIB:.1f} GiB ({_parts(first)})")
        wrong += [why] if (why := cold_start_problem(first, cluster)) else []
    lines += _as_stage(config, cluster)
    fail(wrong)
    if place.cluster is None or card is None:
        lines += _of_this_machine(needs, first, roles, cluster)
    return "\n    ".join([f"of one worker, on {cluster}", *lines])


def _as_stage(config: Config, cluster: ClusterShape) -> list[str]:
    """Describe a policy rank of the `sft` section as a pipeline's stage, which a run of this file has not."""
    if config.sft is None:
        return []
    try:
        settings = SupervisedConfig.from_config(config)
        model = model_of(config.model.model_copy(update={"path": "sft"}), config.sft, config.seed)
    except UserError as error:  # of that stage alone
        return [f"as an sft stage of a pipeline: {error}"]
    memory = cluster.card.memory if cluster.card else 0
    need = supervised_rank(settings, model, Sizes.from_config(settings, gpu=memory > 0, memory=memory))
    problem = supervised_problem(settings, need, cluster)
    return [problem or f"as an sft stage of a pipeline: {_of_role('policy', need)}"]


def _of_role(role: str, need: Footprint) -> str:
    host = f"; {need.total_host / GIB:.1f} GiB each in host memory" if need.total_host else ""
    return f"{role}: {need.total / GIB:.1f} GiB each ({_parts(need)}){host}"


def _parts(need: Footprint) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.parts.items())


def _of_this_machine(
    needs: dict[str, Footprint], first: Footprint | None, roles: Roles, cluster: ClusterShape
) -> list[str]:
    """Compare the host memory of all workers with this machine's. Raises CheckFailed where it lacks some."""
    if cluster.card is not None:
        total = node_host_bytes(needs, roles, cluster)
        remedy = "set checkpoint.background=false, or take back some of `policy.offload`"
        return [_fits("in host memory", total, remedy)] if total else []
    total = sum(need.total * roles.workers[role] for role, need in needs.items())
    remedy = "lower `policy.num_workers`, `rollout.num_workers`, `rollout.kv_cache_gib` or "
    lines = [_fits("all together", total, f"{remedy}`batch.micro_batch_tokens`")]
    if first is not None:
        lines.append(_fits("the cold start alone", first.total, "lower `sft.batch_size`"))
    return lines


def _fits(what: str, needed: int, remedy: str) -> str:
    has = psutil.virtual_memory().total
    text = f"{what} {needed / GIB:.1f} of this machine's {has / GIB:.1f} GiB"
    if needed > has:
        raise CheckFailed(f"{text}; {remedy}")
    return text


def _roles(config: Config, gpus: int) -> Roles:
    """Return the roles on ``gpus``, or on as many as they need: the placement check reports too few."""
    cpus = os.cpu_count() or 1
    try:
        return made_roles(config, Resources(cpus, gpus))
    except UserError:
        try:
            return made_roles(config, Resources(_PLENTY, _PLENTY if gpus else 0))
        except UserError as error:
            raise CheckSkipped("the placement is refused") from error


def this_machine() -> ClusterShape:
    """Return this machine's GPUs as their driver reports them, without starting anything on them. Raises
    UserError as `usable_gpus`.
    """
    count = usable_gpus()  # the driver also lists GPUs that this process may not use
    if not count:
        return ClusterShape(1, 0, None)
    import pynvml  # installed on machines with GPUs alone

    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        name, memory = str(pynvml.nvmlDeviceGetName(device)), pynvml.nvmlDeviceGetMemoryInfo(device).total
    finally:
        pynvml.nvmlShutdown()
    card = card_called(name)
    if card is None:
        raise CheckFailed(
            f"{name} is in no table of `plan`; name a similar one with --cluster, e.g. 1x{count}xA100"
        )
    return ClusterShape(1, count, replace(card, name=name, memory=memory))
