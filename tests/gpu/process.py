"""Runs one job in a separate process, and kills it with all its children.

The process is ``python -m tests.gpu.process DIRECTORY NAME``. It reads NAME.task and writes NAME.found, one
JSON object for each line of the check, as soon as possible.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import json
import math
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.runtime.processes import kill_marked
from grpo_dist.runtime.stacks import listen, look
from tests.gpu.findings import Findings

if TYPE_CHECKING:
    from tests.gpu.check import CheckJob

_MARK = "GRPO_DIST_GPU_CHECK"  # in the environment of all processes of a job, also of Ray and engines
_ROOT = Path(__file__).resolve().parents[2]
_POLL_S, _END_S = 0.05, 30.0
_TAIL = 4000  # characters of a job's output in its error


@dataclass(frozen=True, slots=True)
class CheckTask:
    """The input of a job. ``rehearsal``: without a GPU, tiny. ``directory``: for its files.
    ``device_figures``: figures of the line `device`.
    """

    argument: str
    rehearsal: bool
    directory: Path
    device_figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class JobEnd:
    """``findings``: by line, as far as the job reported; ``error``: why it ended early, or "". ``is_cut``: it
    was ended because the check's time was up, without an error.
    """

    findings: dict[str, Findings]
    error: str
    seconds: float
    is_cut: bool = False


def run_job(job: CheckJob, task: CheckTask, *, limit_s: float, left_s: float = math.inf) -> JobEnd:
    """Run ``job`` for at most ``limit_s``, after which it counts as hung, and at most ``left_s``, the check's
    remaining time. Its output is in NAME.log of the task's directory.
    """
    begin, directory = time.monotonic(), task.directory
    (directory / f"{job.name}.found").unlink(missing_ok=True)
    request = {
        "function": job.function, "argument": task.argument, "rehearsal": task.rehearsal,
        "device_figures": task.device_figures,
    }  # fmt: skip
    (directory / f"{job.name}.task").write_text(json.dumps(request))
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {_MARK: mark, "PYTHONPATH": path}
    if task.rehearsal:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "tests.gpu.process", str(directory), job.name]
    with (directory / f"{job.name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            in_time = _wait(process, begin + min(limit_s, left_s))
            hung = "" if in_time or left_s < limit_s else asyncio.run(look([process.pid]))[process.pid]
        finally:
            kill_marked(f"{_MARK}={mark}")
            ended = _has_ended(process)
    error = ""
    if hung:
        error = f"not finished within {limit_s:.0f} s; its process is {hung}"
    elif in_time and process.returncode:
        error = _failure(process.returncode, directory / f"{job.name}.log")
    if not ended:
        prefix = f"{error}; " if error else ""
        error = f"{prefix}the kernel does not end it: restart the machine before other GPU work"
    findings, seconds = _read(directory / f"{job.name}.found"), time.monotonic() - begin
    return JobEnd(findings, error, seconds, is_cut=not in_time and not error)


def _wait(process: subprocess.Popen[bytes], end: float) -> bool:
    """Return whether ``process`` has ended before ``end``."""
    while process.poll() is None:
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the killed ``process`` ends; one that waits in the GPU's driver may not."""
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _failure(code: int, log: Path) -> str:
    """Return the last line of a job's output, which is the error, and the output before it."""
    lines = log.read_text(errors="replace").strip()[-_TAIL:].splitlines()
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = lines[-1] if lines else "no output"
    return "\n".join([f"{last} ({ended}; {log})", *lines])


def _read(file: Path) -> dict[str, Findings]:
    """Return the job's findings by line, without an incomplete last one."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    plain = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record.pop("line"): Findings.from_plain(record) for record in plain}


def main(directory: Path, name: str) -> None:
    faulthandler.enable()  # also print the stack of a crash in C
    listen()
    request = json.loads((directory / f"{name}.task").read_text())
    module, _, function = request["function"].partition(":")
    measure = getattr(importlib.import_module(f"tests.gpu.{module}"), function)
    task = CheckTask(request["argument"], request["rehearsal"], directory, request["device_figures"])
    with (directory / f"{name}.found").open("w") as file:
        for line, findings in measure(task):
            file.write(json.dumps({"line": line, **findings.plain()}) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
