"""Runs the jobs of a check one after the other, within its time, and records what each line found."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import usable_gpus
from grpo_dist.tools.gpu_check.lines import DEVICE, JOBS, MACHINE, CheckJob, CheckTask, Needs
from grpo_dist.tools.gpu_check.process import JobEnd, run_job
from grpo_dist.tools.gpu_check.record import CheckRecord, LineRecord, LineState
from grpo_dist.tools.gpu_check.sizes import model_shape

_GIB = 2**30
_LEAST_S = 10.0  # a job with less time than this is not started
_PATIENCE = 20  # times the limit of a job on a CPU, which may be slow or busy


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """``jobs``: those with a wanted line; ``only``: wanted lines, empty: all; ``minutes``: for all lines."""

    directory: Path
    jobs: tuple[CheckJob, ...] = JOBS
    only: tuple[str, ...] = ()
    rehearsal: bool = False
    minutes: float = 10.0


def run_check(options: CheckOptions, say: Callable[[str], None]) -> CheckRecord:
    """Run the jobs and write `gpu-check.json` to the directory after each of them.

    `DEVICE` runs in any case: other lines need its figures. Raises UserError without a GPU that CUDA starts
    on, unless it is a rehearsal.
    """
    gpus = 0 if options.rehearsal else usable_gpus()
    if not gpus and not options.rehearsal:
        raise UserError(
            f"gpu-check: torch {torch.__version__} finds no NVIDIA GPU here; look at `nvidia-smi` and "
            "install a CUDA build of torch; or rehearse what needs no GPU: grpo-dist gpu-check --rehearse"
        )
    begin, known, machine = time.monotonic(), dict[str, float](), options.directory / MACHINE
    options.directory.mkdir(parents=True, exist_ok=True)
    machine.unlink(missing_ok=True)
    record = CheckRecord(options.rehearsal, {}, {})
    for job in (DEVICE, *(job for job in options.jobs if job is not DEVICE)):
        task = CheckTask(job.argument, options.rehearsal, options.directory, known)
        left_s = 60 * options.minutes - (time.monotonic() - begin)
        lines, bench = _lines(job, task, gpus, left_s)
        if job is DEVICE:
            known |= lines[0].figures
            record.machine = json.loads(machine.read_text()) if machine.exists() else {}
            record.model = model_shape(task)
        wanted = not options.only or job is DEVICE  # others are shares of its figures
        shown = [line for line in lines if wanted or line.name in options.only]
        record.lines += shown
        record.bench = bench or record.bench
        record.seconds = time.monotonic() - begin
        record.write(options.directory / "gpu-check.json")
        for line in shown:
            say(f"{line.name}: {line.state}, {line.seconds:.0f} s{_because(line)}")
    return record


def _because(line: LineRecord) -> str:
    first = line.reason.partition("\n")[0]
    return f": {first}" if first else ""


def _lines(
    job: CheckJob, task: CheckTask, gpus: int, left_s: float
) -> tuple[list[LineRecord], dict[str, object] | None]:
    """Run ``job`` if the machine has what it needs and time is left. Returns its lines, and a benchmark."""
    if absent := list(missing(job.needs, task, gpus)):
        reason = f"needs {', '.join(absent)}"
        return [LineRecord(line.name, "skipped", reason=reason) for line in job.lines], None
    problem = ""
    if job is not DEVICE and not task.known:
        problem = "`device` found nothing, and the others need its figures"
    elif job is not DEVICE and left_s < _LEAST_S:
        problem = "no time of --minutes was left for it"
    if problem:
        return [LineRecord(line.name, "not run", reason=problem) for line in job.lines], None
    limit_s = job.limit_s * (_PATIENCE if task.rehearsal else 1)
    end = run_job(job, task, limit_s=limit_s, left_s=math.inf if job is DEVICE else left_s)
    benches = [found.bench for found in end.found.values() if found.bench]
    return list(_records(job, end)), benches[0] if benches else None


def _records(job: CheckJob, end: JobEnd) -> Iterator[LineRecord]:
    """Yield the record of each line. A job that ends early leaves the lines that it reported as they are."""
    for line in job.lines:
        found = end.found.get(line.name)
        if found is not None:
            state: LineState = "holds" if found.holds else "fails"
            yield LineRecord(line.name, state, end.seconds, found.figures, found.claims, found.notes)
        elif end.is_cut:
            reason = f"the time of --minutes was up after {end.seconds:.0f} s of it"
            yield LineRecord(line.name, "not run", end.seconds, reason=reason)
        else:
            yield LineRecord(line.name, "fails", end.seconds, reason=end.error or "its job did not report it")


def missing(needs: Needs, task: CheckTask, gpus: int) -> Iterator[str]:
    """Yield what of ``needs`` this machine lacks. A rehearsal needs packages alone."""
    for module in needs.modules:
        if find_spec(module) is None:
            yield f"{module}, which is not installed"
    if task.rehearsal:
        return
    if gpus < needs.gpus:
        yield f"{needs.gpus} GPUs, this machine has {gpus}"
    memory = task.known.get("device/memory_bytes")
    if memory is not None and memory < needs.memory_gib * _GIB:
        yield f"{needs.memory_gib} GiB of GPU memory, this one has {memory / _GIB:.0f}"
    if needs.bfloat16 and task.known.get("device/bfloat16") == 0:
        yield "a GPU that computes bfloat16 (A100 and newer)"
