"""Attention over packed rows, as the trainer calls it, against dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_dist.policy.attention import choose_kernel
from grpo_dist.tools.bench.table import written
from tests.gpu.device import fastest_of, this_device
from tests.gpu.findings import Findings
from tests.gpu.process import CheckTask
from tests.gpu.sizes import ROUNDING, dtype_of

_HEADS = ((14, 2, 64), (12, 2, 128))  # query heads, key-value heads, size: as in 0.5B and 1.5B
_PROMPT = 37  # tokens that the first two rows share
_NAMES = ("output", "gradient of queries", "gradient of keys", "gradient of values")


def attention(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    findings, lengths = Findings(), [5, 33, 60, 1] if task.rehearsal else [5, 130, 700, 1]
    dtype = getattr(torch, dtype_of(task))
    worst = np.zeros(len(_NAMES))
    for heads in _HEADS[:1] if task.rehearsal else _HEADS:
        for window in (None, 33):
            errors = _errors(lengths, heads, window, dtype)
            where = f"{heads[2]}{'_window' if window else ''}"
            findings.figures |= {f"attention/error_{where}_{i}": error for i, error in enumerate(errors)}
            worst = np.maximum(worst, errors)  # NaN stays
    # The softmax is rounded once, the output once; a gradient is a product of two more. In float32 a sum over
    # a row is also rounded at each term.
    terms = math.sqrt(max(lengths)) if dtype == torch.float32 else 1.0
    for name, error, roundings in zip(_NAMES, worst, (4, 8, 8, 8), strict=True):
        why = f"{roundings} roundings of {str(dtype).removeprefix('torch.')}"
        findings.at_most(f"{name}, relative error", error, roundings * ROUNDING[dtype] * terms, why)
    findings.figures |= _speed(task, dtype)
    rate, share = (findings.figures[f"attention/{name}"] for name in ("flops_per_s", "of_matrix_rate"))
    findings.notes.append(f"{written(rate, 'FLOP/s')}, {written(share, '%')} of the matrix rate")
    yield "attention", findings


def _rows(lengths: Sequence[int]) -> tuple[list[np.ndarray], int]:
    """Return the indices of each row in a stream where the second row begins with the first one's prompt."""
    rows, end = [], 0
    for length in lengths:
        rows.append(np.arange(end, end + length))
        end += length
    shared = np.concatenate([rows[1][:_PROMPT], np.arange(end, end + 50)])
    return [*rows, shared], end + 50 + 3  # three tokens in no row


def _errors(
    lengths: Sequence[int], heads: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> list[float]:
    """Return relative errors of the output and of three gradients, also for rows that share tokens."""
    rows, size = _rows(lengths)
    queries, keys, width = heads
    generator = torch.Generator().manual_seed(len(rows) + queries)
    q, k, v = (
        torch.randn(size, h, width, generator=generator).to(this_device(), dtype).requires_grad_()
        for h in (queries, keys, keys)
    )
    weight = torch.randn(size, queries, width, generator=generator).to(this_device())
    read = torch.zeros(size, 1, 1, device=this_device())
    read[torch.from_numpy(np.unique(np.concatenate(rows))).to(this_device())] = (
        1.0  # the others are arbitrary
    )
    groups = [*range(len(lengths)), 1]  # the last row shares a prefix with the second
    spans = choose_kernel("auto", this_device(), dtype)(rows, groups, size, this_device())
    scale = width**-0.5
    out = spans.attend(q, k, v, scale=scale, window=window, dropout=0.0) * read
    gradients = torch.autograd.grad((out.float() * weight).sum(), (q, k, v))
    dense = _dense(rows, [t.detach().double().requires_grad_() for t in (q, k, v)], scale, window, weight)
    return [_apart(a, b) for a, b in zip((out, *gradients), dense, strict=True)]


def _dense(
    rows: Sequence[np.ndarray], operands: Sequence[Tensor], scale: float, window: int | None, weight: Tensor
) -> tuple[Tensor, ...]:
    """Return output and gradients of each row alone, in float64. A token of two rows has the same output in
    both: it attends to the same tokens.
    """
    q, k, v = operands
    out = torch.zeros_like(q)
    for row in rows:
        index = torch.from_numpy(row).to(q.device)
        x, y, z = (t.index_select(0, index).transpose(0, 1)[None] for t in (q, k, v))
        y, z = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (y, z))
        age = torch.arange(len(row), device=q.device)[:, None] - torch.arange(len(row), device=q.device)
        visible = (age >= 0) & (age < (window or len(row)))
        one = scaled_dot_product_attention(x, y, z, attn_mask=visible, scale=scale)[0].transpose(0, 1)
        out = out.index_copy(0, index, one)
    return (out, *torch.autograd.grad((out * weight).sum(), operands))


def _apart(value: Tensor, reference: Tensor) -> float:
    exact = reference.detach()
    return float((value.detach().double() - exact).norm() / exact.norm())


def _speed(task: CheckTask, dtype: torch.dtype) -> dict[str, float]:
    """Return the rate of forward and backward over rows of one length: operations of causal attention."""
    (rows, length), (queries, keys, width) = ((2, 512) if task.rehearsal else (32, 2048)), _HEADS[0]
    q, k, v = (
        torch.randn(rows * length, h, width, device=this_device()).to(dtype).requires_grad_()
        for h in (queries, keys, keys)
    )
    indices = [np.arange(i * length, (i + 1) * length) for i in range(rows)]
    spans = choose_kernel("auto", this_device(), dtype)(indices, range(rows), rows * length, this_device())

    upstream = torch.ones_like(q)

    def both() -> None:
        out = spans.attend(q, k, v, scale=width**-0.5, window=None, dropout=0.0)
        torch.autograd.grad(out, (q, k, v), upstream)

    operations = 6.0 * 2 * rows * queries * width * length * (length + 1) / 2
    rate = operations / fastest_of(3, both)
    matrix_rate = task.device_figures.get("device/matrix_flops_per_s", float("nan"))
    return {"attention/flops_per_s": rate, "attention/of_matrix_rate": rate / matrix_rate}
