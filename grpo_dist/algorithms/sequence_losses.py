"""Policy losses whose ratio belongs to the whole sequence, or to an action of it. Each token carries that
ratio, so every aggregation works; the papers' objectives are those of ``seq-mean-token-mean``.
"""

from __future__ import annotations

import torch

from grpo_dist.algorithms.ratios import (
    bounded_exp,
    clipped_surrogate,
    masked_inputs,
    ratio_stats,
    sequence_mean,
)
from grpo_dist.algorithms.segments import segment_mean
from grpo_dist.algorithms.shapes import LossAndStats, Number, TokenMask, TokenValues


def gspo(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    clip_low: Number = 3e-4, clip_high: Number = 4e-4,
) -> LossAndStats:  # fmt: skip
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s the geometric mean of the token ratios.

    GSPO (Zheng et al. 2025, arXiv:2507.18071), in its token form, equations 13 and 14: the value of s is the
    sequence's, its gradient flows through the token's own log-prob. With one advantage a sequence the
    gradient is that of the sequence form under every aggregation; with token advantages it stays defined.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    mean = sequence_mean(log_ratio, mask).expand_as(log_ratio)
    return _of_means(mean, log_ratio, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def gspo_segment(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    clip_low: Number = 0.2, clip_high: Number = 0.2,
) -> LossAndStats:  # fmt: skip
    """As `gspo` with s the geometric mean over a run of neighbouring unmasked tokens: an action of an
    episode, between two observations. A sequence without given tokens is one.

    It is ROLL's ``ratio_type: segment`` of agentic training, with its bounds, and the token form's gradient.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    mean = segment_mean(log_ratio.detach(), mask)
    return _of_means(mean, log_ratio, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def _of_means(
    mean: TokenValues,
    log_ratio: TokenValues,
    advantages: TokenValues,
    mask: TokenMask,
    *,
    clip_low: Number,
    clip_high: Number,
) -> LossAndStats:
    """Return the clipped surrogate of ratios with the value exp(``mean``) and each token's own gradient."""
    ratio = bounded_exp(mean.detach() + log_ratio - log_ratio.detach(), advantages < 0)
    losses, low, high = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return torch.where(mask, losses, 0.0), ratio_stats(log_ratio, mask, low=low, high=high)


def gmpo(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask,
    kept: TokenMask | None = None, *, clip_low: Number = 0.4, clip_high: Number = 0.4,
) -> LossAndStats:  # fmt: skip
    """-A times the geometric mean of the token ratios, each clipped on its own before the mean is taken.

    GMPO (Zhao et al. 2025, arXiv:2507.20673), equation 4. The bounds are on log r: above ``clip_high`` where
    A > 0, below -``clip_low`` where A < 0 (the paper clips r to exp(-0.4) and exp(0.4)).

    ``kept``: tokens of the mean, those that no rule or cut has removed; None: all of ``mask``. A removed
    token is not in the mean, so that it has no gradient through the terms of the others. With none kept the
    mean is 1.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    low, high = (advantages < 0) & (log_ratio < -clip_low), (advantages > 0) & (log_ratio > clip_high)
    clipped = torch.where(high, clip_high, torch.where(low, -clip_low, log_ratio))
    of_mean = mask if kept is None else mask & kept
    mean = sequence_mean(torch.where(of_mean, clipped, 0.0), of_mean)
    ratio = bounded_exp(mean.expand_as(clipped), advantages != 0)
    return -ratio * advantages, ratio_stats(log_ratio, mask, low=low, high=high)
