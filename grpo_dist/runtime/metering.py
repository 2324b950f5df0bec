"""Measure a worker's busy seconds by stage, time spans, counts and memory since the last reading.

    class Worker(Metered):
        @metered("sample")
        async def sample(self, ...): ...

A stage is busy while at least one of its calls runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import psutil

F = TypeVar("F", bound=Callable[..., Any])
Timer = Callable[[str], AbstractContextManager[None]]  # a `Meter` or `Stopwatch`: times the block by name
_SPANS_KEPT = 1000  # limit for a worker that is never read; the newest stay


@dataclass(frozen=True, slots=True)
class Span:
    """A time span in which a worker was busy.

    Attributes:
        stage: the stage that it worked on.
        begin, end: seconds of `time.time`, so that workers can be compared.
    """

    stage: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Usage:
    """One worker's activity since the last reading. Bytes: peaks since its start, over all its processes."""

    busy_s: dict[str, float] = field(default_factory=dict)  # stage -> seconds
    spans: tuple[Span, ...] = ()
    counts: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_gpu_bytes: int = 0


class Meter:
    """Counts the busy time of stages. Several threads and coroutines may be inside at once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        self._spans: deque[Span] = deque(maxlen=_SPANS_KEPT)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        with self._lock:
            if not self._inside.get(stage):
                self._since[stage] = time.time()
            self._inside[stage] = self._inside.get(stage, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[stage] -= 1
                if not self._inside[stage]:
                    self._note(stage, time.time())

    def count(self, name: str, amount: float) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0.0) + amount

    def read(self) -> Usage:
        """Return the usage since the last call. A stage that is still busy counts up to now."""
        peaks = peak_memory(), peak_gpu_memory()
        with self._lock:
            now = time.time()
            for stage in (s for s, calls in self._inside.items() if calls):
                self._note(stage, now)
                self._since[stage] = now
            usage = Usage(self._busy, tuple(self._spans), self._counts, *peaks)
            self._busy, self._counts = {}, {}
            self._spans.clear()
        return usage

    def _note(self, stage: str, end: float) -> None:
        begin = self._since[stage]
        self._busy[stage] = self._busy.get(stage, 0.0) + end - begin
        self._spans.append(Span(stage, begin, end))


def untimed(_: str) -> AbstractContextManager[None]:
    """A `Timer` that measures nothing."""
    return nullcontext()


class Metered:
    """A worker whose `metered` methods are timed."""

    def __init__(self) -> None:
        self.meter = Meter()

    def usage(self) -> Usage:
        return self.meter.read()


def metered(stage: str) -> Callable[[F], F]:
    """Decorate a method of a `Metered` worker: it counts as ``stage`` while it runs."""

    def decorate(method: F) -> F:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def awaited(self: Metered, *arguments: Any, **options: Any) -> Any:
                with self.meter(stage):
                    return await method(self, *arguments, **options)

            return awaited  # type: ignore[return-value]

        @functools.wraps(method)
        def called(self: Metered, *arguments: Any, **options: Any) -> Any:
            with self.meter(stage):
                return method(self, *arguments, **options)

        return called  # type: ignore[return-value]

    return decorate


def usage_metrics(usage: Mapping[str, Usage]) -> dict[str, float]:
    """Return the metrics of each role ("rollout-0" -> rollout): mean seconds busy in each stage, counts, and
    the memory of its largest worker.

        {"rollout-0": 3 s of sample, "rollout-1": 1 s of sample} -> {"time/rollout_sample_busy_s": 2.0, ...}
    """
    metrics: dict[str, float] = {}
    for role in dict.fromkeys(name.rsplit("-", 1)[0] for name in usage):
        role_usage = [u for name, u in usage.items() if name.rsplit("-", 1)[0] == role]
        for stage in sorted({stage for u in role_usage for stage in u.busy_s}):
            seconds = sum(u.busy_s.get(stage, 0.0) for u in role_usage) / len(role_usage)
            metrics[f"time/{role}_{stage}_busy_s"] = seconds
        for name in sorted({name for u in role_usage for name in u.counts}):
            metrics[f"throughput/{role}_{name}"] = sum(u.counts.get(name, 0.0) for u in role_usage)
        metrics[f"memory/{role}_gib"] = max(u.peak_bytes for u in role_usage) / 2**30
        if gpu := max(u.peak_gpu_bytes for u in role_usage):
            metrics[f"memory/{role}_gpu_gib"] = gpu / 2**30
    # Only training: evaluation engines count turns, too.
    counts = [u.counts for name, u in usage.items() if not name.startswith("evaluation-")]
    turns = EpisodeCounts(
        *(sum(actor_counts.get(name, 0.0) for actor_counts in counts) for name in EpisodeCounts._fields)
    )
    for name in EpisodeCounts._fields:  # replaced by their ratios
        for role in ("rollout", "evaluation"):
            metrics.pop(f"throughput/{role}_{name}", None)
    return metrics | turns.metrics() | _acceptance(metrics)


def _acceptance(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean tokens per verified draft: accepted tokens plus the one drawn after them. {} if
    training engines verified no drafts.
    """
    if not (drafts := metrics.get("throughput/rollout_drafts")):
        return {}
    return {"rollout/acceptance_length": 1 + metrics["throughput/rollout_accepted_tokens"] / drafts}


class EpisodeCounts(NamedTuple):
    """Engines' counts of episodes. ``later_*``: tokens of the engine's prompt, all text before the turn, in
    turns from the second on.
    """

    turns: float = 0.0
    tool_wait_s: float = 0.0
    later_prompt_tokens: float = 0.0
    later_cached_tokens: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the means; {} if there was no turn."""
        metrics: dict[str, float] = {}
        if self.turns:
            metrics["throughput/rollout_turns"] = self.turns
            metrics["time/tool_wait_s"] = self.tool_wait_s / self.turns
        if self.later_prompt_tokens:
            metrics["throughput/episode_cached_share"] = self.later_cached_tokens / self.later_prompt_tokens
        return metrics


def peak_memory() -> int:
    """Return the summed peak resident bytes of all processes in this tree. Shared pages count in each."""
    me = psutil.Process()
    return sum(_high_water(process.pid) for process in (me, *me.children(recursive=True)))


def peak_gpu_memory() -> int:
    """Return the peak bytes that torch reserved on this process's GPU; 0 without a GPU. If another process of
    the worker computes, as in an engine: the bytes now in use on its GPUs, by any process.
    """
    torch = sys.modules.get("torch")  # reward workers do not import it
    if torch is None or not torch.cuda.is_available():
        return 0
    # An actor whose engine computes in other processes may have started CUDA to query the GPU.
    if torch.cuda.is_initialized() and (peak := int(torch.cuda.max_memory_reserved())):
        return peak
    return device_bytes_in_use(os.environ.get("CUDA_VISIBLE_DEVICES") or "0")


def device_bytes_in_use(visible: str) -> int:
    """Return the bytes in use on the GPUs in ``visible``, by number or UUID as in CUDA_VISIBLE_DEVICES. Uses
    NVML: CUDA would create a context of hundreds of megabytes on each device.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name))
            if name.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in visible.split(",")
        ]
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def _high_water(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # the process has ended meanwhile
        return 0
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else 0


class Stopwatch:
    """Measures the phases of a step: ``with watch("update"): ...``. ``spans``: the span of each phase."""

    def __init__(self, begins: Callable[[str], None] = lambda _: None) -> None:
        """``begins``: called with a phase's name when it begins."""
        self._begins = begins
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._begins(phase)
        begin, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(phase, begin, begin + time.perf_counter() - clock))

    def phases(self) -> dict[str, float]:
        """Return the seconds measured so far, as metrics."""
        seconds: dict[str, float] = {}
        for span in self.spans:
            name = f"time/{span.stage}_s"
            seconds[name] = seconds.get(name, 0.0) + span.end - span.begin
        return seconds

    def stop(self) -> dict[str, float]:
        cpu = {"time/driver_cpu_s": time.process_time() - self._cpu_start}
        return self.phases() | cpu | {"time/step_s": time.perf_counter() - self._start}
