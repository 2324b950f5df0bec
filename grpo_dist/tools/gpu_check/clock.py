"""Times and memory of work on this process's device: the first GPU that it sees, or the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from grpo_dist.runtime.hardware import device_type


def device() -> torch.device:
    return torch.device(device_type())


def synchronize() -> None:
    """Wait for all work of the device."""
    if device_type() == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of one call of ``work``, with all that it started on the device."""
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin


def fastest_of(repeats: int, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls; a first one is not counted."""
    work()
    return min(seconds_of(work) for _ in range(repeats))


def peak_bytes_of(work: Callable[[], object]) -> int:
    """Return the most bytes that torch held on the GPU during ``work``, above those before it; 0 on a CPU."""
    if device_type() == "cpu":
        work()
        return 0
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated() - before
