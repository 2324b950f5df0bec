"""Detect this machine's hardware, and choose device, dtype, micro-batch, backends and threads. No other
module makes these choices.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import TYPE_CHECKING, Any, Literal

from grpo_dist.config import TransferBackend
from grpo_dist.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DeviceType = Literal["cuda", "cpu"]
GIB = 2**30  # bytes
_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
COLD_START_LOGITS = 4096  # tokens whose logits exist at once in a cold start
_LARGE_GPU = 70 * 10**9  # bytes; GPUs sold as 80 GB have slightly less


def device_type() -> DeviceType:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def usable_gpus() -> int:
    """Return how many GPUs this process may use; 0 if there are none, if CUDA_VISIBLE_DEVICES hides them, or
    with a CPU build of torch. Creates no CUDA context.

    Raises UserError if the driver lists GPUs but CUDA does not start on them: Ray and the placement would
    count them, and every worker would compute on the CPU.
    """
    import torch

    listed = torch.cuda.device_count()  # from NVML, which works with a driver of any age
    if listed and not _cuda_starts():
        raise UserError(
            f"the driver lists {listed} GPU{'s' if listed > 1 else ''}, and CUDA does not start: "
            f"{_driver_version()}, torch {torch.__version__} built for CUDA {torch.version.cuda}"
            f"{_cuda_error()}; update the driver to one for this CUDA, or install builds of torch and vLLM "
            "for a CUDA of the driver; to compute on the CPU, set CUDA_VISIBLE_DEVICES= (empty)"
        )
    return listed


def _cuda_starts() -> bool:
    """Return whether the CUDA runtime finds a GPU. DeepSpeed and vLLM set a variable that makes torch ask
    NVML instead.
    """
    import torch

    by_nvml = os.environ.pop(_NVML_CHECK, None)
    try:
        return torch.cuda.is_available()
    finally:
        if by_nvml is not None:
            os.environ[_NVML_CHECK] = by_nvml


def _cuda_error() -> str:
    """Return ": " and CUDA's error if it does not start; "" if it starts."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f": {str(error).strip().partition(chr(10))[0]}"
    return ""


def _driver_version() -> str:
    """Describe the version of NVIDIA's driver and its newest supported CUDA."""
    try:
        import pynvml
    except ImportError:
        return "a driver of unknown version (nvidia-ml-py is not installed; see `nvidia-smi`)"
    try:
        pynvml.nvmlInit()
        try:
            version, cuda = pynvml.nvmlSystemGetDriverVersion(), int(pynvml.nvmlSystemGetCudaDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"a driver of unknown version ({error})"
    return f"driver {version} for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"  # 12020 is 12.2


def resolve_dtype(
    name: Literal["auto", "float32", "bfloat16"], device: DeviceType | None = None
) -> torch.dtype:
    """Return the compute dtype. ``auto``: bfloat16 on a GPU that computes in it, else float32. A GPU of
    another machine (``device`` is cuda, and there is none here) is assumed to.

    float32 on CPUs has two reasons: the engine is bit-reproducible for any batch composition, and bfloat16
    kernels crash with an illegal instruction for some head sizes on processors without AMX.
    """
    import torch

    device = device or device_type()
    if name == "auto":
        elsewhere = not torch.cuda.is_available()
        # vLLM refuses emulated bfloat16.
        is_supported = elsewhere or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if device == "cuda" and is_supported else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def limit_gpu_memory(share: float, device: torch.device) -> None:
    """Limit this process to ``share`` of its GPU's memory, so that a process that needs more does not fail
    others on the GPU. No effect on a CPU or for a whole GPU.
    """
    import torch

    if device.type == "cuda" and share < 1:
        torch.cuda.set_per_process_memory_fraction(share)


def micro_batch_tokens(chosen: int | None, device: DeviceType) -> int:
    """Return the tokens of a micro-batch. Few on a CPU: a micro-batch that fits its caches is faster."""
    return chosen or (16384 if device == "cuda" else 4096)


def device_memory() -> int:
    """Return the memory of this machine's GPU, bytes; 0 if there is none."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if device_type() == "cuda" else 0


def logprob_chunk_mib(device: DeviceType, memory: int | None = None) -> int:
    """Return the size of a block of logits, MiB; two exist at once. ``memory``: device memory, bytes; None:
    this machine's.

    The backward pass reads and writes the gradient of the head's weight, float32 [V, D], once per block. A
    GPU with room for large blocks spends less time on that.
    """
    if device == "cpu":
        return 32
    memory = device_memory() if memory is None else memory
    return 1024 if memory >= _LARGE_GPU else 256


def collective_backend(device: DeviceType | None = None) -> Literal["gloo", "nccl"]:
    """Return the backend of the ranks' process group."""
    return "nccl" if (device or device_type()) == "cuda" else "gloo"


def transfer_backend(
    name: Literal["auto"] | TransferBackend,
    device: DeviceType,
    *,
    one_host: bool,
    colocated: bool = False,
) -> TransferBackend:
    """Return the weight transport from the policy, which is on ``device``, to the engines.

    ``one_host``: policy and engines are on one machine. ``colocated``: each engine is on a GPU of the policy,
    which NCCL refuses. Raises UserError for a transport that cannot reach all engines.
    """
    if name == "shared_memory" and not one_host:
        raise UserError(
            "weight_sync.backend = shared_memory needs policy and engines on one host, and the cluster put "
            "them on several; use auto"
        )
    if name == "ipc" and not colocated:
        raise UserError(
            "weight_sync.backend = ipc needs policy and engines on the same GPUs, but they are separate; use "
            "auto, or set cluster.placement=colocated"
        )
    if name == "nccl" and colocated:
        raise UserError(
            "weight_sync.backend = nccl cannot connect two processes on one GPU, and policy and engines "
            "share GPUs; use auto, or cluster.placement=separate on a cluster with GPUs for both"
        )
    if name != "auto":
        return name
    if device == "cpu":
        return "shared_memory" if one_host else "gloo"
    return "ipc" if colocated else "nccl"


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a process with ``threads`` CPU threads. Set them before importing
    torch: OpenMP reads them once.
    """
    count = str(max(1, threads))
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        # Waiting threads spin for about 50 microseconds, then sleep. Longer spinning blocks other processes:
        # two engines on the same two cores took 8.3 s per batch each with this value, and 12.9 s with 10000;
        # libgomp's default is 300000.
        "GOMP_SPINCOUNT": "1000",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute only in the calling thread inside the block. If several processes share the same
    cores, waiting for more threads costs more than they save.
    """
    import torch

    # vLLM replaces `torch.set_num_threads` with a no-op.
    before, change = torch.get_num_threads(), torch._C.set_num_threads
    change(1)
    try:
        yield
    finally:
        change(before)


@contextmanager
def inductor_settings_kept() -> Iterator[None]:
    """Keep the number of compile threads of `torch.compile`. Importing vLLM sets it to 1 for this process and
    its children.
    """
    import torch._inductor.config  # noqa: F401  # slow to import; reads the variable once

    before = os.environ.get(_COMPILE_THREADS)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_COMPILE_THREADS, None)
        else:
            os.environ[_COMPILE_THREADS] = before


def quiet_libraries() -> None:
    """Silence progress bars and device warnings of libraries, and keep transformers' generation code out of
    processes that only load a tokenizer or a configuration.
    """
    if device_type() == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
    from transformers.utils import logging

    logging.disable_progress_bar()
    _skip_generation_code()


def _skip_generation_code() -> None:
    """Make transformers' auto classes import its generation code lazily: only models with remote code use it,
    and it imports torch's compiler and sharded tensors (3 CPU seconds).
    """
    name = "transformers.models.auto.auto_factory"
    if name in sys.modules:
        return
    generation: Any = import_module("transformers.generation")
    generation.GenerationMixin = object  # instead of importing it
    auto_factory: Any = import_module(name)
    del generation.GenerationMixin
    add_mixin = auto_factory.add_generation_mixin_to_remote_model

    def import_and_add(model_class: type) -> type:
        auto_factory.GenerationMixin = generation.GenerationMixin
        return add_mixin(model_class)

    auto_factory.add_generation_mixin_to_remote_model = import_and_add


def has_layer_kernels() -> bool:
    """Return whether liger-kernel, for `model.kernels`, is installed here."""
    return find_spec("liger_kernel") is not None


def torch_computes_on_gpus() -> bool:
    """Return whether the installed torch is a GPU build, without importing it."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return run_path(str(Path(spec.origin).with_name("version.py")))["cuda"] is not None


def available_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``. A copy from host to GPU is asynchronous: torch keeps the pinned memory
    until it has finished.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@cache
def processor_digest(described: Path = Path("/proc/cpuinfo")) -> str:
    """Return 16 hexadecimal digits that identify this processor's model and instructions. They key compiled
    code: machines may share a home directory, and another machine's instructions would crash.
    """
    fields = ("model name", "flags", "Features", "CPU part")  # the latter two on ARM
    lines = {line for line in described.read_text().splitlines() if line.startswith(fields)}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
