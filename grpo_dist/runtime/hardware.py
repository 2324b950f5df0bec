"""What this machine has, and what follows: device, dtype, attention, collective backend. Decided here and
nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from grpo_dist.config import TransferBackend
from grpo_dist.errors import UserError

DeviceType = Literal["cuda", "cpu"]
GIB = 2**30  # bytes


def device_type() -> DeviceType:
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(
    name: Literal["auto", "float32", "bfloat16"], device: DeviceType | None = None
) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU that computes in it and float32 elsewhere. A GPU of another machine
    (``device`` is cuda where there is none here) cannot be asked, and counts as one that does.

    float32 on CPUs because there the engine is then bit-reproducible for any batch composition, and because
    bfloat16 kernels die with an illegal instruction for some head sizes on processors without AMX.
    """
    device = device or device_type()
    if name == "auto":
        computes = not torch.cuda.is_available() or torch.cuda.is_bf16_supported()
        return torch.bfloat16 if device == "cuda" and computes else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def micro_batch_tokens(chosen: int | None, device: DeviceType) -> int:
    """Tokens of a micro-batch. On a CPU few: what fits its caches is faster than a larger one."""
    return chosen or (16384 if device == "cuda" else 4096)


def logprob_chunk_mib(chosen: int | None, device: DeviceType) -> int:
    """Size of a block of logits, MiB."""
    return chosen or (256 if device == "cuda" else 32)


def collective_backend(device: DeviceType | None = None) -> Literal["gloo", "nccl"]:
    """Backend of the ranks' process group."""
    return "nccl" if (device or device_type()) == "cuda" else "gloo"


def transfer_backend(
    name: Literal["auto"] | TransferBackend,
    device: DeviceType,
    *,
    one_host: bool,
    colocated: bool = False,
) -> TransferBackend:
    """Transport of the weights from the policy, which is on ``device``. ``one_host``: all that receive them
    are on its machine; ``colocated``: each is on a GPU of the policy's, which NCCL refuses. Raises UserError
    for a transport that does not reach all.
    """
    if name == "shared_memory" and not one_host:
        raise UserError(
            "weight_sync.backend = shared_memory needs policy and engines on one host, and the cluster put "
            "them on several; use auto"
        )
    if name == "ipc" and not colocated:
        raise UserError(
            "weight_sync.backend = ipc needs policy and engines on the same GPUs, and each has its own; use "
            "auto, or set cluster.placement=colocated"
        )
    if name != "auto":
        return name
    if device == "cpu":
        return "shared_memory" if one_host else "gloo"
    return "ipc" if colocated else "nccl"


def thread_environment(threads: int) -> dict[str, str]:
    """Environment of a process that may use ``threads`` CPU threads. Set before torch is imported: OpenMP
    reads it once.
    """
    count = str(max(1, threads))
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        # Threads that wait for each other spin for some 50 microseconds, then sleep. Longer spinning takes
        # the cores from others: two engines on the same two took 8.3 s a batch each with this, 12.9 s with
        # 10000, and libgomp's own default is 300000.
        "GOMP_SPINCOUNT": "1000",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes with the calling thread alone: for work that goes on in several processes at
    once on cores that each counts as its own, where threads that wait for each other lose far more than they
    win.
    """
    # vLLM puts a function that does nothing in the place of `torch.set_num_threads`.
    before, change = torch.get_num_threads(), torch._C.set_num_threads
    change(1)
    try:
        yield
    finally:
        change(before)


def quiet_libraries() -> None:
    """Keep what libraries say about themselves out of the terminal: progress bars of loading, guesses about
    devices.
    """
    if device_type() == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it looked for GPUs in vain
    from transformers.utils import logging

    logging.disable_progress_bar()


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
