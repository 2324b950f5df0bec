"""vLLM's kernels for norms in engines on CPUs: the CPU build has them, and vLLM keeps them to GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

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
    own = [PROVIDER, "native"]
    return IrOpPriorityConfig.with_default(["native"], rms_norm=own, fused_add_rms_norm=own)


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
