"""Runs one job in its own process, and ends it with everything that it started."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from grpo_dist.runtime.guardian import kill_marked
from grpo_dist.runtime.stacks import look
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.lines import CheckJob, CheckTask

_MARK = "GRPO_DIST_GPU_CHECK"  # in the environment of a job's processes, Ray's and an engine's among them
_POLL_S, _END_S = 0.05, 30.0
_TAIL = 4000  # characters of a job's output in its error


@dataclass(frozen=True, slots=True)
class JobEnd:
    """``found``: by line, of those that the job reported; ``error``: why it ended before its end, or ""."""

    found: dict[str, Findings]
    error: str
    seconds: float


def run_job(job: CheckJob, task: CheckTask, *, limit_s: float) -> JobEnd:
    """Run ``job`` for at most ``limit_s``. Its output is in NAME.log of the task's directory."""
    begin, directory = time.monotonic(), task.directory
    (directory / f"{job.name}.found").unlink(missing_ok=True)
    asked = {"module": job.module, "argument": task.argument} | {
        "rehearsal": task.rehearsal,
        "known": task.known,
    }
    (directory / f"{job.name}.task").write_text(json.dumps(asked))
    mark = uuid.uuid4().hex
    environment = os.environ | {_MARK: mark} | ({"CUDA_VISIBLE_DEVICES": ""} if task.rehearsal else {})
    command = [sys.executable, "-m", "grpo_dist.tools.gpu_check.child", str(directory), job.name]
    with (directory / f"{job.name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            hung = _wait(process, begin + limit_s)
        finally:
            kill_marked(f"{_MARK}={mark}")
            ended = _ends(process)
    error = ""
    if hung is not None:
        error = f"not finished within {limit_s:.0f} s; its process is {hung}"
        if not ended:
            error += "; the kernel does not end it: restart the machine before other GPU work"
    elif process.returncode:
        error = _failure(process.returncode, directory / f"{job.name}.log")
    return JobEnd(_read(directory / f"{job.name}.found"), error, time.monotonic() - begin)


def _wait(process: subprocess.Popen[bytes], end: float) -> str | None:
    """Return None once ``process`` has ended, or where it is at ``end``."""
    while process.poll() is None:
        if time.monotonic() >= end:
            return asyncio.run(look([process.pid]))[process.pid]
        time.sleep(_POLL_S)
    return None


def _ends(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the killed ``process`` ends; one that waits in the GPU's driver may not."""
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _failure(code: int, log: Path) -> str:
    """Return the last line of a job's output, which is the error, and what was before it."""
    lines = log.read_text(errors="replace").strip()[-_TAIL:].splitlines()
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = lines[-1] if lines else "no output"
    return "\n".join([f"{last} ({ended}; {log})", *lines])


def _read(file: Path) -> dict[str, Findings]:
    """Return what the job reported; a last line that its end has cut short is left out."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    plain = [json.loads(line) for line in lines if line.endswith("\n")]
    return {own.pop("line"): Findings.of(own) for own in plain}
