"""The functions of `logit_rows` on GPUs, for float32 logits, which they do not overwrite: the forward pass
reads each logit once, the backward pass reads it once and writes its gradient.

torch's operations read or write a block of logits about fifteen times in each pass. On an H100, with 8,192
rows of width 896 and 152,000 tokens, that takes 31 and 41 ms and these kernels 6 and 15 ms, matrix products
included (guides/gpus.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from grpo_dist.policy.logit_rows import RowSums
from grpo_dist.runtime.logit_transform import IDENTITY, LogitTransform

_BLOCK = 4096  # logits that a program holds at once
_WARPS = 8


def logprobs(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    temperature: float | int | Float[Tensor, " N"],
    *,
    with_entropy: bool,
) -> tuple[Float[Tensor, " N"], RowSums]:
    """Do as `logit_rows.logprobs`, always with entropies: they cost nothing. Invalid targets give NaN."""
    logits, targets = logits.contiguous(), targets.contiguous()
    values = logits.new_empty(len(logits))
    sums = RowSums.empty_like(values)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        if len(logits):
            _forward[(len(logits),)](
                logits, targets, _expand_temperature(temperature, values), values, *sums.tensors,
                logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    return values, sums


def gradient(
    logits: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    temperature: float | int | Float[Tensor, " N"],
    sums: RowSums,
    grad: Float[Tensor, " N"] | None,
    entropy_grad: Float[Tensor, " N"] | None,
    dtype: torch.dtype,
    total: Float[Tensor, " N"] | None = None,
    transform: LogitTransform = IDENTITY,
) -> Float[Tensor, "N V"]:
    logits, targets = logits.contiguous(), targets.contiguous()
    out, temperatures = torch.empty_like(logits, dtype=dtype), _expand_temperature(temperature, sums.largest)
    upstream = (
        torch.zeros_like(temperatures) if g is None else (g / temperatures).contiguous()
        for g in (grad, grad if total is None else total, entropy_grad)
    )
    with torch.cuda.device_of(logits):
        if len(logits):
            _backward[(len(logits),)](
                logits, targets, temperatures, *(t.contiguous() for t in sums.tensors), *upstream, out,
                transform.slope, transform.cap or 1.0, logits.shape[1],
                CAPPED=transform.cap is not None, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    return out


def _expand_temperature(temperature: float | Tensor, like: Tensor) -> Tensor:
    """Return the temperature of each row, float32 [N]."""
    if isinstance(temperature, Tensor):
        return temperature.to(like).contiguous()
    return torch.full_like(like, float(temperature))


@triton.jit
def _forward(  # type: ignore[no-untyped-def]  # Triton reads annotations as its own
    logits, targets, temperatures, values, entropies, largest, logarithms, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    # Running values: the largest x, the sum of exp(x - top), and the sum of (x - top) exp(x - top).
    top, total, weighted = -float("inf"), 0.0, 0.0
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocabulary + columns, mask=columns < vocabulary, other=-float("inf"))
        x /= temperature
        new_top = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)  # all masked so far
        shift = tl.where(top == -float("inf"), 0.0, top - base)
        x -= base
        p = tl.exp(x)
        weighted = (weighted + shift * total) * tl.exp(shift) + tl.sum(tl.where(p > 0, x, 0.0) * p, 0)
        total = total * tl.exp(shift) + tl.sum(p, 0)
        top = new_top
    logarithm = tl.log(total)
    target = tl.load(targets + row)
    is_token = (target >= 0) & (target < vocabulary)
    x = tl.load(logits + row * vocabulary + target, mask=is_token, other=0.0) / temperature
    tl.store(values + row, tl.where(is_token, x - top - logarithm, float("nan")))
    tl.store(entropies + row, logarithm - weighted / total)
    tl.store(largest + row, top)
    tl.store(logarithms + row, logarithm)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    logits, targets, temperatures, entropies, largest, logarithms, grads, totals, entropy_grads, out,
    slope, cap, vocabulary, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, target = tl.load(temperatures + row), tl.load(targets + row)
    top, logarithm = tl.load(largest + row), tl.load(logarithms + row)
    entropy, entropy_grad = tl.load(entropies + row), tl.load(entropy_grads + row)
    grad, total = tl.load(grads + row), tl.load(totals + row)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < vocabulary
        logit = tl.load(logits + row * vocabulary + columns, mask=mask, other=0.0)
        x = logit / temperature - top - logarithm
        p = tl.exp(x)
        d = -p * tl.where(p > 0, total + entropy_grad * (x + entropy), 0.0)  # 0 for a logit of -inf
        d += tl.where(columns == target, grad, 0.0)
        d *= slope  # `LogitTransform.derivative`
        if CAPPED:
            d *= 1.0 - (logit / cap) * (logit / cap)
        tl.store(out + row * vocabulary + columns, d.to(out.dtype.element_ty), mask=mask)
