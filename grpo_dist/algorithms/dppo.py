"""DPPO: policy losses whose trust region is how far the probability of a token moved, not its ratio.

Qi et al. 2026 (arXiv:2602.04879). A ratio says little: from 0.001 to 0.002 is a ratio of 2 and no divergence,
from 0.99 to 0.5 the reverse. With only the sampled token known, its distribution is taken as binary: this
token or any other.

    from p to q              ratio   |q - p|   KL(p, q) of the binary distributions
    0.001 -> 0.002           2       0.001     0.0003
    0.4   -> 0.8             2       0.4       0.3819
    0.99  -> 0.5             0.505   0.49      0.6371
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_dist.algorithms.ratios import (
    LOG_LIMIT,
    at_least_float32,
    masked_inputs,
    masked_logprobs,
    ratio_stats,
)
from grpo_dist.algorithms.shapes import LossAndStats, Number, TokenMask, TokenValues

_LEAST_OTHER = 1e-8  # probability that a token leaves for all others, at least: float32 has none below 6e-8


def binary_kl(old_logprobs: TokenValues, new_logprobs: TokenValues) -> TokenValues:
    """Return KL(old, new), in nats, of the distributions over "this token" and "any other".

    p log(p / q) + (1 - p) log((1 - p) / (1 - q)) with p = exp(old), q = exp(new). 1 - p and 1 - q are at
    least 1e-8, so that the value is finite for a token that is certain.
    """
    old, new = at_least_float32(old_logprobs), at_least_float32(new_logprobs)
    other_old, other_new = _log_of_others(old), _log_of_others(new)
    return old.exp() * (old - new) + other_old.exp() * (other_old - other_new)


def total_variation(old_logprobs: TokenValues, new_logprobs: TokenValues) -> TokenValues:
    """Return |exp(new) - exp(old)|, the total variation between the same binary distributions."""
    return (at_least_float32(new_logprobs).exp() - at_least_float32(old_logprobs).exp()).abs()


def _log_of_others(logprobs: TokenValues) -> TokenValues:
    return torch.log(-torch.expm1(logprobs.clamp(max=-_LEAST_OTHER)))


def dppo_tv(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    clip_low: Number = 0.2, clip_high: Number = 0.2, ratio_cap: Number = 20.0,
) -> LossAndStats:  # fmt: skip
    """-stop_gradient(min(r, ratio_cap)) A log pi, without tokens whose probability itself has moved too far:
    by more than ``clip_high`` up where A > 0, or more than ``clip_low`` down where A < 0.

    DPPO with the binary total-variation bound (Qi et al. 2026, arXiv:2602.04879).
    """
    return _gated(
        logprobs, old_logprobs, advantages, mask, total_variation,
        clip_low=clip_low, clip_high=clip_high, ratio_cap=ratio_cap,
    )  # fmt: skip


def dppo_kl(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    clip_low: Number = 0.05, clip_high: Number = 0.05, ratio_cap: Number = 20.0,
) -> LossAndStats:  # fmt: skip
    """-stop_gradient(min(r, ratio_cap)) A log pi, without tokens whose `binary_kl` from the old policy is
    above ``clip_high`` where A > 0 and the probability rose, or above ``clip_low`` where A < 0 and it fell.

    DPPO with the binary KL bound (Qi et al. 2026, arXiv:2602.04879); ``clip_low``, ``clip_high``: nats.
    """
    return _gated(
        logprobs, old_logprobs, advantages, mask, binary_kl,
        clip_low=clip_low, clip_high=clip_high, ratio_cap=ratio_cap,
    )  # fmt: skip


def _gated(
    logprobs: TokenValues,
    old_logprobs: TokenValues,
    advantages: TokenValues,
    mask: TokenMask,
    divergence_of: Callable[[Tensor, Tensor], Tensor],
    *,
    clip_low: Number,
    clip_high: Number,
    ratio_cap: Number,
) -> LossAndStats:
    """Return the weighted loss without tokens that moved beyond a bound in their advantage's direction."""
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    own = masked_logprobs(logprobs, mask)
    with torch.no_grad():
        divergence = divergence_of(masked_logprobs(old_logprobs, mask), own)
        low = (advantages < 0) & (log_ratio < 0) & (divergence > clip_low)
        high = (advantages > 0) & (log_ratio > 0) & (divergence > clip_high)
        weight = log_ratio.clamp(max=LOG_LIMIT).exp().clamp(max=ratio_cap)
        weight = torch.where(low | high, 0.0, weight)
    losses = -weight * advantages * own
    return losses, ratio_stats(log_ratio, mask, low=low, high=high)
