"""Weights from one GPU to another: rank 0 sends random weights, rank 1 receives them and once drops out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actors.transfer.connections import Seat, new_secret
from actors.transfer.stream import receive, send
from actors.transfer.transport import free_port, open_broadcasts
from grpo_dist.errors import TransferLost
from grpo_dist.policy.weight_buckets import ParameterSpec, make_buckets
from grpo_dist.runtime.hardware import device_type
from grpo_dist.tools.bench.limit_jobs import Barrier
from grpo_dist.tools.bench.limits import run_jobs
from grpo_dist.tools.bench.table import written
from tests.gpu.device import seconds_of, this_device
from tests.gpu.findings import Findings
from tests.gpu.process import CheckTask

_PARAMETERS, _BUCKETS = 16, 4
_TIMES = 3
_BYTES, _BYTES_REHEARSED = 1 << 30, 1 << 22
NOTICED_S = 10.0  # a sender must notice within this time that the receiver is gone
_DEADLINE_S = 60.0  # deadline of a transfer; a timeout does not count as noticing


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Settings of both ends of a transfer, which ``secret`` authenticates."""

    backend: str
    port: int  # port of the first group
    next_port: int  # port of the group after the cut
    secret: bytes = field(repr=False)
    num_bytes: int  # per transfer
    timeout_s: float  # deadline of each part

    @property
    def specs(self) -> list[ParameterSpec]:
        each = self.num_bytes // _PARAMETERS // 2
        return [ParameterSpec(f"p{i}", "bfloat16", (each,)) for i in range(_PARAMETERS)]

    @property
    def bucket_bytes(self) -> int:
        return self.num_bytes // _BUCKETS

    def open(self, rank: int, port: int) -> Any:
        seat = Seat("127.0.0.1", port, rank, 2, self.secret)
        return open_broadcasts(self.backend, seat, timeout_s=self.timeout_s)


def measure(barrier: Barrier, *, plan: TransferPlan, rank: int) -> dict[str, Any]:
    """Return seconds and losses of the sender, or the receiver's checks."""
    return (_sender if rank == 0 else _receiver)(barrier, plan)


def _sender(barrier: Barrier, plan: TransferPlan) -> dict[str, Any]:
    link, weights = plan.open(0, plan.port), _weights(plan)
    sent: list[float] = []
    for _ in range(_TIMES):
        barrier.wait()  # bounded: it ends with its parent
        sent.append(seconds_of(lambda: send(link, _buckets(plan, weights), plan.specs, plan.bucket_bytes)))
    raw, flat = [], torch.ones(plan.num_bytes, dtype=torch.uint8, device=link.device)
    for _ in range(_TIMES):
        barrier.wait()  # bounded: it ends with its parent
        raw.append(seconds_of(lambda: link.broadcast(flat)))
    barrier.wait()  # bounded: it ends with its parent
    begin, lost = time.perf_counter(), False
    try:
        for _ in range(_TIMES):  # more than a connection buffers while its peer does not read
            send(link, _buckets(plan, weights), plan.specs, plan.bucket_bytes)
    except TransferLost:
        lost = True
    noticed_s = time.perf_counter() - begin
    link.close()
    begin = time.perf_counter()
    link = plan.open(0, plan.next_port)
    reconnect_s = time.perf_counter() - begin
    send(link, _buckets(plan, weights), plan.specs, plan.bucket_bytes)
    link.close()
    return {
        "seconds": sent, "raw_seconds": raw, "noticed_s": noticed_s, "lost": lost, "reconnect_s": reconnect_s,
    }  # fmt: skip


def _receiver(barrier: Barrier, plan: TransferPlan) -> dict[str, Any]:
    transport, whole = plan.open(1, plan.port), 0
    for _ in range(_TIMES):
        barrier.wait()  # bounded: it ends with its parent
        whole += _receive_all(transport, plan)
    flat = torch.zeros(plan.num_bytes, dtype=torch.uint8, device=transport.device)
    for _ in range(_TIMES):
        barrier.wait()  # bounded: it ends with its parent
        transport.broadcast(flat)
    barrier.wait()  # bounded: it ends with its parent
    next(receive(transport, plan.specs, plan.bucket_bytes))
    transport.close()  # in the middle of the transfer
    transport = plan.open(1, plan.next_port)
    again = _receive_all(transport, plan)
    transport.close()
    return {"whole": whole == _TIMES, "whole_again": again}


def _weights(plan: TransferPlan) -> dict[str, Tensor]:
    target = this_device() if plan.backend == "nccl" else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(spec.shape, generator=generator) for spec in plan.specs)
    return {spec.name: t.to(target, torch.bfloat16) for spec, t in zip(plan.specs, numbers, strict=True)}


def _buckets(plan: TransferPlan, weights: dict[str, Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
    for bucket in make_buckets(plan.specs, plan.bucket_bytes):
        yield [(spec.name, weights[spec.name]) for spec in bucket]


def _receive_all(transport: Any, plan: TransferPlan) -> bool:
    """Receive the weights; `receive` raises if their checksum differs from the sender's."""
    count = sum(len(bucket) for bucket in receive(transport, plan.specs, plan.bucket_bytes))
    if device_type() == "cuda":
        torch.cuda.synchronize()
    return count == len(plan.specs)


def nccl(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    """Time a transfer, a cut one, and the group after it."""
    findings, size = Findings(), _BYTES_REHEARSED if task.rehearsal else _BYTES
    plan = TransferPlan(
        "nccl" if device_type() == "cuda" else "gloo", free_port("127.0.0.1"), free_port("127.0.0.1"),
        new_secret(), size, _DEADLINE_S,
    )  # fmt: skip
    jobs: list[dict[str, Any]] = [{"plan": plan, "rank": rank} for rank in range(2)]
    sent, received = run_jobs(measure, jobs, threads=1, gpus=1)
    rate, limit = size / min(sent["seconds"]), size / min(sent["raw_seconds"])
    findings.figures |= {
        "nccl/bytes_per_s": rate, "nccl/raw_bytes_per_s": limit, "nccl/of_raw": rate / limit,
        "nccl/noticed_s": sent["noticed_s"], "nccl/reconnect_s": sent["reconnect_s"],
    }  # fmt: skip
    findings.notes.append(f"{written(rate, 'B/s')}, {written(rate / limit, '%')} of one broadcast")
    findings.true("all bytes arrive", received["whole"], "the receiver compares checksums")
    findings.true("a cut transfer is reported as lost", sent["lost"], "TransferLost, not the deadline")
    findings.at_most("seconds until then", sent["noticed_s"], NOTICED_S, "the connection next to it closes")
    findings.true("all bytes arrive in the next group", received["whole_again"], "a new communicator")
    yield "nccl", findings
