"""What is submitted, and the record of it that `status`, `logs` and `stop` read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.runtime.cache import cache_dir
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.json_files import read_json

RECORD = "submitted.json"
_SHUTDOWN_S = 30  # beyond `checkpoint.grace_s`: actors end, files are closed
_LONGEST_NAME = 38  # with its digest 47: what KubeRay allows a RayJob


@dataclass(frozen=True)
class Variable:
    """Of a job's environment. ``hidden``: its value is shown to nobody."""

    name: str
    value: str
    hidden: bool


@dataclass(frozen=True)
class Job:
    config: Config
    path: Path  # of the configuration file, absolute
    overrides: tuple[str, ...]
    environment: tuple[Variable, ...] = ()

    @property
    def run_dir(self) -> Path:
        return run_directory(self.config)

    @property
    def name(self) -> str:
        """That of the run directory on every cluster; fit for a DNS label: ``my-run-1a2b3c4d``."""
        digest = hashlib.sha256(str(self.run_dir).encode()).hexdigest()[:8]
        plain = re.sub(r"[^a-z0-9]+", "-", self.config.name.lower())[:_LONGEST_NAME].strip("-")
        return f"{plain if plain[:1].isalpha() else 'run-' + plain}"[:_LONGEST_NAME].strip("-") + f"-{digest}"

    @property
    def stop_patience(self) -> dict[str, str]:
        """The variable by which Ray waits long enough before it kills a job that is to stop."""
        wait_s = int(self.config.checkpoint.grace_s) + _SHUTDOWN_S
        return {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}


@dataclass(frozen=True)
class SubmissionRecord:
    """What became of a submission."""

    target: str
    job: str  # as the cluster calls it
    run_dir: str
    where: str = ""  # Ray: address; KubeRay: namespace
    log: str = ""  # Slurm: the file
    submitted_at: str = ""  # UTC

    def write(self) -> None:
        stamped = asdict(self) | {"submitted_at": datetime.now(UTC).isoformat(timespec="seconds")}
        run_dir, text = Path(self.run_dir), json.dumps(stamped, indent=2) + "\n"
        if run_dir.is_dir() or run_dir.parent.is_dir():
            try:
                return write_text(run_dir / RECORD, text)
            except OSError:  # only the cluster may write there; the job is submitted all the same
                pass
        write_text(_elsewhere(run_dir), text)


@dataclass(frozen=True)
class JobState:
    """Of a job. ``live``: it waits or runs."""

    text: str
    live: bool


def run_directory(config: Config) -> Path:
    return Path(os.path.abspath(Path(config.output_dir).expanduser() / config.name))


def read_record(run_dir: Path) -> SubmissionRecord | None:
    """Of the last submission of this run; None where there was none. Raises UserError for a broken one."""
    run_dir = Path(os.path.abspath(run_dir))
    found = [_read(path) for path in (run_dir / RECORD, _elsewhere(run_dir)) if path.is_file()]
    return max(found, key=lambda record: record.submitted_at, default=None)


def _read(path: Path) -> SubmissionRecord:
    try:
        return SubmissionRecord(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: not the record of a submission ({error}); ask the cluster itself, and remove the file "
            "to submit again"
        ) from error


def _elsewhere(run_dir: Path) -> Path:
    """Of the record where the storage of the cluster is not there on this machine."""
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
    return cache_dir() / "submitted" / f"{run_dir.name}-{digest}.json"
