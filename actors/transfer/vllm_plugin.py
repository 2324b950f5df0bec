"""What vLLM loads in each of its processes, through the entry point group `vllm.general_plugins`."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actors.transfer import WEIGHT_TRANSFER
from grpo_dist.runtime.stacks import listen

_LARGE_VOCABULARY = 8192  # with fewer entries torch's sums are as exact as all else
_PARTS = 64  # sums of a row, which are then added up
_ROWS = 32  # corrected at once: their exponentials stay in a core's cache, all of a batch take twice as long


def register() -> None:
    """Register this project's weight transfer with vLLM, and have CPU engines use its kernels for norms and
    give exact log-probs. vLLM calls it once per process, sometimes more.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if WEIGHT_TRANSFER not in Factory._registry:
        Factory.register_engine(WEIGHT_TRANSFER, "actors.transfer.vllm_receiver", "PackedWeightTransfer")
    register_norms()
    _give_exact_logprobs()
    _end_with_parent()
    listen()


def _give_exact_logprobs() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    if not current_platform.is_cpu() or hasattr(Sampler.compute_logprobs, "__wrapped__"):
        return

    def sampled(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def exact(self: Any, *arguments: Any, **named: Any) -> Any:
            tokens, values = forward(self, *arguments, **named)
            return tokens, exact_logprobs(values) if self.logprobs_mode == "processed_logprobs" else values

        return exact

    TopKTopPSampler.forward_cpu = sampled(TopKTopPSampler.forward_cpu)
    TopKTopPSampler.forward_native = sampled(TopKTopPSampler.forward_native)
    compute = Sampler.compute_logprobs

    @functools.wraps(compute)
    def computed(logits: torch.Tensor) -> torch.Tensor:
        return exact_logprobs(compute(logits))

    Sampler.compute_logprobs = staticmethod(computed)


def exact_logprobs(logprobs: torch.Tensor) -> torch.Tensor:
    """Correct what torch's log_softmax on a CPU gives, float32 [B, V], so that probabilities add up to 1.
    Returns ``logprobs``, which it overwrites.

    It adds up the V exponentials in few float32 sums, where a small term after a large one is lost: with the
    49,152 entries of SmolLM2 every log-prob was 1.8e-5 nats too high on average, seven times the rounding of
    the whole model. Here each sum has V / 64 terms. A row's values do not depend on the others or on threads.
    """
    size = logprobs.shape[-1]
    if size < _LARGE_VOCABULARY:
        return logprobs
    whole = size - size % _PARTS
    for rows in logprobs.split(_ROWS):
        probabilities = rows.exp()
        total = probabilities[:, :whole].unflatten(1, (_PARTS, -1)).sum(-1).sum(-1)
        total += probabilities[:, whole:].sum(-1)
        rows -= total.log()[:, None]
    return logprobs


def _end_with_parent() -> None:
    """Kill this process when the one that started it ends, even if that was killed.

    vLLM's own worker waits for its engine in places where it does not notice that the engine is gone.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()  # bounded: a thread that does nothing else
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


_WATCH = "grpo-dist: end with parent"


_MULTIPLE = 8  # the kernels refuse rows of another size
PROVIDER = "grpo_dist"  # what vLLM calls these implementations


def register_norms() -> None:
    """Register the implementations with vLLM, and have CPU engines that do not compile prefer them. Compiled,
    a norm is fused with what surrounds it.

    Each norm takes eight passes of torch otherwise: 15 % of the time of an engine with SmolLM2 on two cores.
    """
    from vllm import ir
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_ir_kernels()  # also loads torch.ops._C
    ir.ops.rms_norm.register_impl(
        PROVIDER, supported=hasattr(torch.ops._C, "rms_norm"), supports_args=_norm_is_supported
    )(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        PROVIDER,
        supported=hasattr(torch.ops._C, "fused_add_rms_norm"),
        supports_args=_sum_is_supported,
        inplace=True,
    )(_fused_add_rms_norm)
    type(current_platform).get_default_ir_op_priority = staticmethod(_preferred)


def _preferred(vllm_config):
    """Return vLLM's ``IrOpPriorityConfig`` for ``vllm_config``."""
    from vllm.config import CompilationMode
    from vllm.config.kernel import IrOpPriorityConfig

    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        return IrOpPriorityConfig.with_default(["native"])
    providers = [PROVIDER, "native"]
    return IrOpPriorityConfig.with_default(["native"], rms_norm=providers, fused_add_rms_norm=providers)


# vLLM compares names, types and defaults of these four with those of its own implementations.


def _norm_is_supported(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    plain = variance_size is None and weight is not None and weight.dtype == x.dtype
    return plain and x.shape[-1] % _MULTIPLE == 0


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    # The kernel reads rows that follow each other. Norms of heads get a part of the queries, keys and values.
    output = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(output, x.contiguous(), weight, epsilon)
    return output


def _sum_is_supported(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    rows_follow = x.is_contiguous() and x_residual.is_contiguous()
    return rows_follow and _norm_is_supported(x, weight, epsilon, variance_size)


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
