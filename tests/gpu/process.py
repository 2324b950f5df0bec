"""Runs one job in its own process, and ends it with everything that it started.

The process is ``python -m tests.gpu.process DIRECTORY NAME``. It reads NAME.task and writes NAME.found, one
JSON object a line of the check, as soon as that is known.
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

_MARK = "GRPO_DIST_GPU_CHECK"  # in the environment of a job's processes, Ray's and an engine's among them
_ROOT = Path(__file__).resolve().parents[2]
_POLL_S, _END_S = 0.05, 30.0
_TAIL = 4000  # characters of a job's output in its error


@dataclass(frozen=True, slots=True)
class CheckTask:
    """What a job is given. ``rehearsal``: without a GPU, tiny. ``directory``: for its files. ``known``: the
    figures of the line `device`.
    """

    argument: str
    rehearsal: bool
    directory: Path
    known: dict[str, float]


@dataclass(frozen=True, slots=True)
class JobEnd:
    """``found``: by line, of those that the job reported; ``error``: why it ended before its end, or "".
    ``is_cut``: it was ended because the time of the check was up, not for an error of its own.
    """

    found: dict[str, Findings]
    error: str
    seconds: float
    is_cut: bool = False


def run_job(job: CheckJob, task: CheckTask, *, limit_s: float, left_s: float = math.inf) -> JobEnd:
    """Run ``job`` for at most ``limit_s``, after which it has hung, and at most ``left_s``, the time of the
    check. Its output is in NAME.log of the task's directory.
    """
    begin, directory = time.monotonic(), task.directory
    (directory / f"{job.name}.found").unlink(missing_ok=True)
    asked = {
        "function": job.function, "argument": task.argument, "rehearsal": task.rehearsal, "known": task.known
    }  # fmt: skip
    (directory / f"{job.name}.task").write_text(json.dumps(asked))
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = (
        os.environ
        | {_MARK: mark, "PYTHONPATH": path}
        | ({"CUDA_VISIBLE_DEVICES": ""} if task.rehearsal else {})
    )
    command = [sys.executable, "-m", "tests.gpu.process", str(directory), job.name]
    with (directory / f"{job.name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            in_time = _wait(process, begin + min(limit_s, left_s))
            hung = "" if in_time or left_s < limit_s else asyncio.run(look([process.pid]))[process.pid]
        finally:
            kill_marked(f"{_MARK}={mark}")
            ended = _ends(process)
    error = ""
    if hung:
        error = f"not finished within {limit_s:.0f} s; its process is {hung}"
    elif in_time and process.returncode:
        error = _failure(process.returncode, directory / f"{job.name}.log")
    if not ended:
        own = f"{error}; " if error else ""
        error = f"{own}the kernel does not end it: restart the machine before other GPU work"
    found, seconds = _read(directory / f"{job.name}.found"), time.monotonic() - begin
    return JobEnd(found, error, seconds, is_cut=not in_time and not error)


def _wait(process: subprocess.Popen[bytes], end: float) -> bool:
    """Return whether ``process`` has ended before ``end``."""
    while process.poll() is None:
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


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


def main(directory: Path, name: str) -> None:
    faulthandler.enable()  # a crash in C leaves a stack, too
    listen()
    asked = json.loads((directory / f"{name}.task").read_text())
    module, _, function = asked["function"].partition(":")
    measure = getattr(importlib.import_module(f"tests.gpu.{module}"), function)
    task = CheckTask(asked["argument"], asked["rehearsal"], directory, asked["known"])
    with (directory / f"{name}.found").open("w") as file:
        for line, found in measure(task):
            file.write(json.dumps({"line": line, **found.plain()}) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
