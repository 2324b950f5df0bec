"""Shared by all targets: a job, its submission record for `status`, `logs` and `stop`, cluster programs
(sbatch, squeue, kubectl) with a deadline, and the files of `launch/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from grpo_dist.config import Config
from grpo_dist.errors import UserError, expanded
from grpo_dist.runtime.files import read_json, write_text
from grpo_dist.runtime.model_files import cache_dir

RECORD = "submitted.json"
_SHUTDOWN_S = 30  # added to `checkpoint.grace_s`, for actors to end and files to close
_LONGEST_NAME = 38  # 47 with the digest, KubeRay's limit for a RayJob
_DEADLINE_S = 120.0  # deadline of a cluster program
# The files of `launch/`: in the checkout, else installed by the wheel.
_CHECKOUT = Path(__file__).resolve().parents[3] / "launch"
_INSTALLED = "share/grpo-dist/launch"


@dataclass(frozen=True)
class Variable:
    """An environment variable of a job. ``hidden``: its value is never shown."""

    name: str
    value: str
    hidden: bool


@dataclass(frozen=True)
class Job:
    config: Config
    path: Path  # absolute path of the configuration file
    overrides: tuple[str, ...]
    environment: tuple[Variable, ...] = ()

    @property
    def run_dir(self) -> Path:
        return run_directory(self.config.name, self.config.output_dir)

    @property
    def name(self) -> str:
        """Job name, unique to the run directory and a valid DNS label: ``my-run-1a2b3c4d``."""
        digest = hashlib.sha256(str(self.run_dir).encode()).hexdigest()[:8]
        plain = re.sub(r"[^a-z0-9]+", "-", self.config.name.lower())[:_LONGEST_NAME].strip("-")
        return f"{plain if plain[:1].isalpha() else 'run-' + plain}"[:_LONGEST_NAME].strip("-") + f"-{digest}"

    @property
    def stop_patience(self) -> dict[str, str]:
        """Environment variable that makes Ray wait for the checkpoint before it kills a stopped job."""
        wait_s = int(self.config.checkpoint.grace_s) + _SHUTDOWN_S
        return {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}


@dataclass(frozen=True)
class SubmissionRecord:
    """A submission: its target and job id."""

    target: str
    job: str  # its id on the cluster
    run_dir: str
    where: str = ""  # Ray: address; KubeRay: namespace
    log: str = ""  # Slurm: log file
    submitted_at: str = ""  # UTC

    def write(self) -> None:
        stamped = asdict(self) | {"submitted_at": datetime.now(UTC).isoformat(timespec="seconds")}
        run_dir, text = Path(self.run_dir), json.dumps(stamped, indent=2) + "\n"
        if run_dir.is_dir() or run_dir.parent.is_dir():
            try:
                return write_text(run_dir / RECORD, text)
            except OSError:  # only the cluster may be able to write there; the job is already submitted
                pass
        write_text(_elsewhere(run_dir), text)


@dataclass(frozen=True)
class JobState:
    """State of a job. ``live``: pending or running."""

    text: str
    live: bool


def run_directory(name: str, output_dir: str) -> Path:
    return Path(os.path.abspath(expanded(output_dir) / name))


def read_record(run_dir: Path) -> SubmissionRecord | None:
    """Read the record of the last submission; None if there is none. Raises UserError for an invalid one."""
    run_dir = Path(os.path.abspath(run_dir))
    records = [_read(path) for path in (run_dir / RECORD, _elsewhere(run_dir)) if path.is_file()]
    return max(records, key=lambda record: record.submitted_at, default=None)


def _read(path: Path) -> SubmissionRecord:
    try:
        return SubmissionRecord(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: not the record of a submission ({error}); ask the cluster itself, and remove the file "
            "to submit again"
        ) from error


def _elsewhere(run_dir: Path) -> Path:
    """Return the record's path if the cluster's storage is not mounted on this machine."""
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
    return cache_dir() / "submitted" / f"{run_dir.name}-{digest}.json"


class Refused(UserError):
    """The program failed; has the program's message."""


def ask(command: Sequence[str], *, stdin: str | None = None, is_printed: bool = False) -> str:
    """Run ``command`` and return its output. ``is_printed``: stream it to stdout instead, without deadline.

    Raises Refused with the program's message if it fails, UserError if it is missing or does not answer.
    """
    if shutil.which(command[0]) is None:
        raise UserError(
            f"{command[0]}: no such program here; submit from a machine that has it, such as a login node"
        )
    try:
        run = subprocess.run(
            command, input=stdin, text=True, check=False,
            capture_output=not is_printed, timeout=None if is_printed else _DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UserError(f"`{' '.join(command)}` did not answer within {_DEADLINE_S:g} s") from error
    if run.returncode:
        output = "" if is_printed else ": " + (run.stderr.strip() or run.stdout.strip()).replace("\n", " ")
        raise Refused(f"`{' '.join(command)}` failed with exit code {run.returncode}{output}")
    return "" if is_printed else run.stdout


def template(name: str) -> str:
    """Return the text of `launch/NAME`. Raises FileNotFoundError for a broken installation."""
    here = _CHECKOUT / name
    if here.is_file():
        return here.read_text(encoding="utf-8")
    try:
        installed = [f for f in files("grpo-dist") or [] if f.as_posix().endswith(f"{_INSTALLED}/{name}")]
    except PackageNotFoundError:
        installed = []
    if not installed:
        raise FileNotFoundError(f"launch/{name} is not installed; install grpo-dist again")
    return Path(str(installed[0].locate())).read_text(encoding="utf-8")
