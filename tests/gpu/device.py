"""The GPU's speed without this project: a large matrix product and copies; and helpers that time its work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import torch

from grpo_dist.runtime.hardware import device_type, resolve_dtype
from grpo_dist.tools.bench.flops import card_peak
from grpo_dist.tools.bench.limit_jobs import matmul_rate
from grpo_dist.tools.bench.result import machine_facts
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.accelerators import card_called
from tests.gpu.findings import Findings
from tests.gpu.process import CheckTask

_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
_REPEATS = 5
_OTHER = "a healthy card reaches two thirds and more; less: shared, capped or throttled"


def device(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    kind, findings = device_type(), Findings()
    (task.directory / "machine.json").write_text(json.dumps(machine_facts()))
    dtype = resolve_dtype("auto")
    host, pinning = _host_memory(_BYTES[kind])
    rate, (local, to_host, from_host) = matmul_rate(dtype), _copies(host)
    findings.figures |= {
        "device/matrix_flops_per_s": rate,
        "device/copy_bytes_per_s": local,
        "device/to_host_bytes_per_s": to_host,
        "device/from_host_bytes_per_s": from_host,
        "device/pin_bytes_per_s": pinning,
    }
    findings.notes.append(
        f"matrix product {written(rate, 'FLOP/s')}; copies within {written(local, 'B/s')}, "
        f"to the host {written(to_host, 'B/s')}, from it {written(from_host, 'B/s')}"
    )
    findings.true("rates are measured", min(rate, local, to_host, from_host) > 0, "others are shares of them")
    if kind == "cuda":
        _check_card(findings, dtype)
    yield "device", findings


def _check_card(findings: Findings, dtype: torch.dtype) -> None:
    properties = torch.cuda.get_device_properties(0)
    findings.figures |= {
        "device/memory_bytes": float(properties.total_memory),
        "device/bfloat16": float(torch.cuda.is_bf16_supported(including_emulation=False)),
        "device/capability": properties.major + properties.minor / 10,
    }
    peak, card = card_peak(properties.name), card_called(properties.name)
    if peak and dtype == torch.bfloat16:
        share = findings.figures["device/matrix_flops_per_s"] / peak
        findings.figures["device/of_data_sheet"] = share
        findings.at_least("matrix product, share of the data sheet", share, 0.5, _OTHER)
    if card:
        share = 2 * findings.figures["device/copy_bytes_per_s"] / card.hbm  # each byte is read and written
        findings.at_least("copy within the device, share of its memory's rate", share, 0.5, _OTHER)


def _host_memory(size: int) -> tuple[torch.Tensor, float]:
    """Return pinned host memory and the bytes per second at which it was pinned, without the CUDA context."""
    torch.ones(1, device=this_device())
    begin = time.perf_counter()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device_type() == "cuda")
    rate = size / (time.perf_counter() - begin)
    return host.fill_(1), rate


def _copies(host: torch.Tensor) -> tuple[float, float, float]:
    """Return bytes per second of copies within the device, to ``host``, and from it."""
    source, other = (torch.ones(len(host), dtype=torch.uint8, device=this_device()) for _ in range(2))

    def rate(into: torch.Tensor, out: torch.Tensor) -> float:
        return len(host) / fastest_of(_REPEATS, lambda: into.copy_(out, non_blocking=True))

    return rate(other, source), rate(host, source), rate(source, host)


def this_device() -> torch.device:
    return torch.device(device_type())


def synchronize() -> None:
    """Wait for all work of the device."""
    if device_type() == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of one call of ``work``, including all its work on the device."""
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin


def fastest_of(repeats: int, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, after a warm-up call."""
    work()
    return min(seconds_of(work) for _ in range(repeats))


def peak_bytes_of(work: Callable[[], object]) -> int:
    """Return torch's peak bytes on the GPU during ``work``, above the bytes before it; 0 on a CPU."""
    if device_type() == "cpu":
        work()
        return 0
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated() - before
