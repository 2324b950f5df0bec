"""The check of a machine with GPUs: its jobs, their order and time, and the record of each line's findings.

A job measures one line, or several that share workers, in a separate process, so that the check adds nothing
to a measurement of memory. It reports each line as soon as possible: a later failure does not affect it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_dist.runtime.files import replace_nan, write_text
from tests.gpu.findings import Claim
from tests.gpu.process import CheckTask, JobEnd, run_job
from tests.gpu.sizes import model_shape

CHECK_SCHEMA = 3  # raise it when a figure changes its meaning
_GIB = 2**30
_LEAST_S = 10.0  # a job with less time than this is not started
_PATIENCE = 20  # factor of a job's limit on a CPU, which may be slow or busy
_TRAINER, _ENGINE = ("deepspeed",), ("deepspeed", "ray", "vllm")


@dataclass(frozen=True, slots=True)
class CheckJob:
    """``function``: MODULE:NAME in `tests.gpu`, called with a `CheckTask`; it yields a line's name with its
    `Findings`. ``limit_s``: after this time it counts as hung and is killed. The others are requirements:
    GPUs, bfloat16, GiB of each GPU, packages.
    """

    function: str
    lines: tuple[str, ...]
    limit_s: float
    argument: str = ""
    gpus: int = 1
    bfloat16: bool = True
    memory_gib: int = 0
    modules: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of its files: its first line."""
        return self.lines[0]


def _zero(stage: int) -> CheckJob:
    needs: dict[str, Any] = {"bfloat16": stage > 0, "memory_gib": 20, "modules": _TRAINER}
    return CheckJob("updates:zero", (f"zero{stage}",), 150, str(stage), **needs)


DEVICE = CheckJob("device:device", ("device",), 60, bfloat16=False)
# In the order of execution: the most telling lines come first, as the time may not suffice for all.
# `engine-graphs` makes the model and compiles code that the engines of `steps` and `bench` then load.
_ON_LOOP: dict[str, Any] = {"memory_gib": 20, "modules": _ENGINE}
_ON_ENGINES: dict[str, Any] = {"memory_gib": 12, "modules": _ENGINE}
_LINES_OF_LOOP = ("steps", "mismatch-bfloat16", "turns", "sync")
JOBS = (
    DEVICE,
    CheckJob("attention:attention", ("attention",), 60),
    CheckJob("head:head", ("head",), 60, memory_gib=8),
    CheckJob("engines:engine", ("engine-graphs", "seeds"), 240, "graphs", **_ON_ENGINES),
    CheckJob("loop:loop", _LINES_OF_LOOP, 240, "bfloat16", **_ON_LOOP),
    *(_zero(stage) for stage in (1, 2, 3)),
    CheckJob("loop:short_bench", ("bench",), 300, **_ON_LOOP),
    CheckJob("transfers:nccl", ("nccl",), 90, gpus=2, bfloat16=False, memory_gib=4, modules=("vllm",)),
    CheckJob("engines:tensor_parallel", ("tensor-parallel",), 150, gpus=2, memory_gib=8, modules=_ENGINE),
    CheckJob("engines:replace", ("replace",), 150, **_ON_ENGINES),
    CheckJob("loop:loop", ("mismatch-float32",), 150, "float32", bfloat16=False, **_ON_LOOP),
    CheckJob(
        "updates:sequence_parallel", ("sequence-parallel",), 90, gpus=2, memory_gib=20, modules=_TRAINER
    ),
    CheckJob("updates:speed", ("speed",), 120, memory_gib=20, modules=_TRAINER),
    CheckJob("engines:engine", ("engine-eager",), 90, "eager", **_ON_ENGINES),
    _zero(0),
)
LINES = tuple(line for job in JOBS for line in job.lines)


@dataclass(frozen=True, slots=True)
class LineRecord:
    """``state``: holds, fails, skipped (the machine lacks something), or not run (no time left). ``seconds``:
    of its job. ``reason``: why it was skipped or not run, or the error that ended it.
    """

    name: str
    state: str
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""


class Check:
    """Runs jobs when their lines are requested, for at most ``minutes`` in total, and writes `gpu-check.json`
    to the directory after each: figures, claims, the machine, and a bench.json, which `plan --bench` reads.
    """

    def __init__(self, directory: Path, *, rehearsal: bool, minutes: float, gpus: int) -> None:
        self.directory, self.rehearsal, self.minutes = directory, rehearsal, minutes
        self._gpus, self._begin = gpus, time.monotonic()
        self._device_figures: dict[str, float] = {}
        self.lines: dict[str, LineRecord] = {}
        self._bench: dict[str, Any] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def line(self, name: str) -> LineRecord:
        """Return the record of line ``name``; run its job first, and before it `DEVICE` for its figures."""
        for job in (DEVICE, *(job for job in JOBS if name in job.lines)):
            if job.name not in self.lines:
                self._run(job)
                self._write()
        return self.lines[name]

    def lines_with_state(self, state: str) -> list[str]:
        return [line.name for line in self.lines.values() if line.state == state]

    def _run(self, job: CheckJob) -> None:
        task = CheckTask(job.argument, self.rehearsal, self.directory, self._device_figures)
        left_s = 60 * self.minutes - (time.monotonic() - self._begin)
        reason, state = "", "not run"
        if absent := list(missing(job, task, self._gpus)):
            reason, state = f"needs {', '.join(absent)}", "skipped"
        elif job is not DEVICE and not self._device_figures:
            reason = "`device` found nothing, and the others need its figures"
        elif job is not DEVICE and left_s < _LEAST_S:
            reason = "no time of --minutes was left for it"
        if reason:
            self.lines |= {line: LineRecord(line, state, reason=reason) for line in job.lines}
            return
        limit_s = job.limit_s * (_PATIENCE if self.rehearsal else 1)
        end = run_job(job, task, limit_s=limit_s, left_s=math.inf if job is DEVICE else left_s)
        self.lines |= {record.name: record for record in records(job, end)}
        self._bench = next((line.bench for line in end.findings.values() if line.bench), self._bench)
        if job is DEVICE:
            self._device_figures |= self.lines[job.name].figures

    def _write(self) -> None:
        machine, task = self.directory / "machine.json", CheckTask("", self.rehearsal, self.directory, {})
        lines = list(self.lines.values())
        plain = {
            "kind": "gpu-check", "schema": CHECK_SCHEMA, "rehearsal": self.rehearsal,
            "machine": json.loads(machine.read_text()) if machine.exists() else {},
            "model": model_shape(task), "seconds": time.monotonic() - self._begin,
            "lines": [asdict(line) for line in lines], "bench": self._bench,
            "figures": {name: value for line in lines for name, value in line.figures.items()},
        }  # fmt: skip
        write_text(self.directory / "gpu-check.json", json.dumps(replace_nan(plain), indent=1) + "\n")


def records(job: CheckJob, end: JobEnd) -> Iterator[LineRecord]:
    """Yield the record of each line. Lines that a job reported before an early end stay valid."""
    for line in job.lines:
        findings = end.findings.get(line)
        if findings is not None:
            state = "holds" if findings.holds else "fails"
            yield LineRecord(line, state, end.seconds, findings.figures, findings.claims, findings.notes)
        elif end.is_cut:
            reason = f"the time of --minutes was up after {end.seconds:.0f} s of it"
            yield LineRecord(line, "not run", end.seconds, reason=reason)
        else:
            yield LineRecord(line, "fails", end.seconds, reason=end.error or "its job did not report it")


def missing(job: CheckJob, task: CheckTask, gpus: int) -> Iterator[str]:
    """Yield the requirements that this machine lacks. A rehearsal only needs packages."""
    for module in job.modules:
        if find_spec(module) is None:
            yield f"{module}, which is not installed"
    if task.rehearsal:
        return
    if gpus < job.gpus:
        yield f"{job.gpus} GPUs, this machine has {gpus}"
    memory = task.device_figures.get("device/memory_bytes")
    if memory is not None and memory < job.memory_gib * _GIB:
        yield f"{job.memory_gib} GiB of GPU memory, this one has {memory / _GIB:.0f}"
    if job.bfloat16 and task.device_figures.get("device/bfloat16") == 0:
        yield "a GPU that computes bfloat16 (A100 and newer)"
