"""Weights from one GPU to another by NCCL; a transfer that is cut off; and the group after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from actors.transfer.handshake import new_secret
from actors.transfer.transport import free_port
from grpo_dist.runtime.hardware import device_type
from grpo_dist.tools.bench.limits import run_jobs
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.transfer_job import TransferPlan

_BYTES, _BYTES_REHEARSED = 1 << 30, 1 << 22
NOTICED_S = 10.0  # in which a sender finds out that the receiver is gone
_DEADLINE_S = 60.0  # of a transfer: noticing by it would be no noticing


def measure(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    found, size = Findings(), _BYTES_REHEARSED if task.rehearsal else _BYTES
    plan = TransferPlan(
        "nccl" if device_type() == "cuda" else "gloo",
        free_port("127.0.0.1"),
        free_port("127.0.0.1"),
        new_secret(),
        size,
        _DEADLINE_S,
    )
    jobs: list[dict[str, Any]] = [{"plan": plan, "rank": rank} for rank in range(2)]
    sent, received = run_jobs("grpo_dist.tools.gpu_check.transfer_job", jobs, threads=1, gpus=1)
    rate, limit = size / min(sent["seconds"]), size / min(sent["raw_seconds"])
    found.figures |= {
        "nccl/bytes_per_s": rate,
        "nccl/raw_bytes_per_s": limit,
        "nccl/of_raw": rate / limit,
        "nccl/noticed_s": sent["noticed_s"],
        "nccl/reconnect_s": sent["reconnect_s"],
    }
    found.notes.append(f"{written(rate, 'B/s')}, {written(rate / limit, '%')} of one broadcast")
    found.true("all bytes arrive", received["whole"], "the receiver compares checksums")
    found.true("a cut transfer is reported as lost", sent["lost"], "TransferLost, not the deadline")
    found.at_most("seconds until then", sent["noticed_s"], NOTICED_S, "the connection next to it closes")
    found.true("all bytes arrive in the next group", received["whole_again"], "a new communicator")
    yield "nccl", found
