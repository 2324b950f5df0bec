"""The plugin that vLLM loads in each of its processes (entry point group `vllm.general_plugins`)."""

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

_LARGE_VOCABULARY = 8192  # torch's sums are accurate enough for smaller ones
_PARTS = 64  # partial sums per row
_ROWS = 32  # rows corrected at once: they stay in a core's cache; a whole batch takes twice as long


def register() -> None:
    """Register this project's weight transfer with vLLM. Make CPU engines use vLLM's norm kernels and return
    exact log-probs. vLLM calls this once per process, sometimes more often.
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
    """Correct log-probs of torch's log_softmax on a CPU, float32 [B, V], so that probabilities sum to 1.
    Overwrites and returns ``logprobs``.

    torch adds the V exponentials in few float32 sums, where small terms after large ones are lost: with
    SmolLM2's 49,152 entries, log-probs were 1.8e-5 nats too high on average, seven times the rounding of the
    whole model. Here each sum has V / 64 terms. A row's values do not depend on other rows or on threads.
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
    """Kill this process when its parent ends, even if the parent was killed.

    vLLM's worker waits for its engine in places where it does not notice that the engine is gone.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def watch() -> None:
        parent.join()  # bounded: a thread that does nothing else
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


_WATCH = "grpo-dist: end with parent"


_MULTIPLE = 8  # the kernels require row sizes that are multiples of this
PROVIDER = "grpo_dist"  # vLLM's name for these implementations


def register_norms() -> None:
    """Register the norm implementations with vLLM. CPU engines that do not compile prefer them; compilation
    fuses a norm with its neighbours.

    Otherwise each norm takes eight torch passes: 15 % of an engine's time with SmolLM2 on two cores.
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


# vLLM compares the signatures of these four with its own implementations: names, types and defaults.


def _norm_is_supported(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    plain = variance_size is None and weight is not None and weight.dtype == x.dtype
    return plain and x.shape[-1] % _MULTIPLE == 0


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    # The kernel reads contiguous rows. Per-head norms get a slice of the queries, keys and values.
    output = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(output, x.contiguous(), weight, epsilon)
    return output


def _sum_is_supported(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    contiguous = x.is_contiguous() and x_residual.is_contiguous()
    return contiguous and _norm_is_supported(x, weight, epsilon, variance_size)


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
