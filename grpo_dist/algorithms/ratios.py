"""Inputs of every policy loss: masked log-ratios, their means over a sequence or an action, and statistics
that add up over any split of rows.

A row is a sample; index t describes its token t. Statistics are sums over unmasked tokens, or maxima where
the name ends in ``_max``: they combine exactly over micro-batches and ranks.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TokenValues = Float[Tensor, "B T"]
TokenMask = Bool[Tensor, "B T"]
Number = float | int
Stats = dict[str, Tensor]  # sums over unmasked tokens; maxima where the name ends in _max
LossAndStats = tuple[TokenValues, Stats]

LOG_LIMIT = 60.0  # nats; exp of it, 1e26, is past every bound on a ratio and far from overflowing float32


def masked_inputs(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask
) -> tuple[TokenValues, TokenValues]:
    """Return log-ratios logprobs - old_logprobs, in nats, and advantages; both are 0 where masked. No
    gradient flows into ``old_logprobs``.

    Both are at least float32: bfloat16 has 8 bits, and near a log-prob of -5 they are 0.03 nats apart, beyond
    the bounds of a sequence ratio (3e-4).
    """
    logprobs, old_logprobs = at_least_float32(logprobs), at_least_float32(old_logprobs.detach())
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    log_ratio = torch.where(mask, logprobs, zero) - torch.where(mask, old_logprobs, zero)
    return log_ratio, torch.where(mask, advantages.to(logprobs.dtype), zero)


def at_least_float32(values: Float[Tensor, ...]) -> Float[Tensor, ...]:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def bounded_exp(log_ratio: TokenValues, unbounded: TokenMask) -> TokenValues:
    """Return exp of ``log_ratio``, clamped at `LOG_LIMIT` except where ``unbounded``.

    Where clamped, a bound of the loss or an advantage of 0 makes the loss constant in such large ratios. They
    must not overflow: 0 * inf is NaN in the backward pass. Where ``unbounded`` the gradient stays; a ratio
    that overflows gives a non-finite loss, which the trainer refuses.
    """
    return torch.where(unbounded, log_ratio, log_ratio.clamp(max=LOG_LIMIT)).exp()


def masked_logprobs(logprobs: TokenValues, mask: TokenMask) -> TokenValues:
    """Return ``logprobs`` in at least float32, 0 where masked."""
    return torch.where(mask, at_least_float32(logprobs), 0.0)


def sequence_mean(values: TokenValues, mask: TokenMask) -> Float[Tensor, "B 1"]:
    """Return the mean over each row's unmasked tokens, 0 without any. ``values`` are 0 where masked."""
    return values.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def segment_mean(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return for each unmasked token the mean of its run of neighbouring unmasked tokens, an action of an
    episode between two observations; 0 where masked.

        mask      . x x . x x x .
        values      1 3   2 4 6
        mean        2 2   4 4 4
    """
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    width = mask.shape[1] + 1  # above the runs of any row; index 0 is before the first run
    rows = torch.arange(len(mask), device=mask.device)[:, None]
    index = (rows * width + begins.long().cumsum(dim=1))[mask]
    sums, counts = torch.zeros(2, len(mask) * width, dtype=values.dtype, device=values.device)
    sums.index_add_(0, index, values[mask])
    counts.index_add_(0, index, torch.ones_like(values[mask]))
    out = torch.zeros_like(values)
    out[mask] = sums[index] / counts[index]
    return out


def clipped_surrogate(
    ratio: TokenValues, advantages: TokenValues, *, clip_low: Number, clip_high: Number
) -> tuple[TokenValues, TokenMask, TokenMask]:
    """Return -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), and where the lower and the upper
    bound removed the gradient.
    """
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    low, high = (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)
    return losses, low, high


@torch.no_grad()
def ratio_stats(
    log_ratio: TokenValues,
    mask: TokenMask,
    *,
    low: TokenMask | None = None,
    high: TokenMask | None = None,
    capped: TokenMask | None = None,
) -> Stats:
    """Return ``ratio``, ``ratio_max``, ``clip_low``, ``clip_high``, ``dual_clip`` (tokens whose gradient a
    bound removed or capped; None: no such bound) and ``approx_kl`` (k3 of old to new, nats).
    """
    none = torch.zeros_like(mask)
    zero = torch.zeros((), dtype=log_ratio.dtype, device=log_ratio.device)
    ratio = log_ratio.exp()
    return {
        "ratio": torch.where(mask, ratio, zero).sum(),
        "ratio_max": torch.where(mask, ratio, zero).max() if mask.numel() else zero,
        "clip_low": (mask & (none if low is None else low)).sum(),
        "clip_high": (mask & (none if high is None else high)).sum(),
        "dual_clip": (mask & (none if capped is None else capped)).sum(),
        "approx_kl": torch.where(mask, torch.expm1(log_ratio) - log_ratio, zero).sum(),
    }
