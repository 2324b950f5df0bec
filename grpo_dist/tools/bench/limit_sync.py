"""Limit of the weight sync: one broadcast of all bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from grpo_dist.runtime.hardware import device_type
from grpo_dist.tools.bench.child import Barrier


def measure(
    barrier: Barrier,
    *,
    num_bytes: int,
    rank: int,
    world_size: int,
    port: int,
    secret: bytes,
    backend: str,
    repeats: int,
) -> list[float]:
    """Return the seconds of each repeat. ``backend``: gloo, nccl, or "copy" within one shared GPU."""
    device = device_type()
    buffer = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    if backend == "copy":
        into = torch.ones_like(buffer)
        return _repeat(barrier, lambda: into.copy_(buffer), repeats)
    from actors.transfer.connections import Seat  # not for a copy
    from actors.transfer.transport import open_broadcasts

    seat = Seat("127.0.0.1", port, rank, world_size, secret)
    transport = open_broadcasts(backend, seat, timeout_s=300)
    seconds = _repeat(barrier, lambda: transport.broadcast(buffer), repeats)
    transport.close()
    return seconds


def _repeat(barrier: Barrier, send: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):  # the first makes what is made lazily
        barrier.wait()  # bounded: it ends with its parent
        begin = time.perf_counter()
        send()
        if device_type() == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]
