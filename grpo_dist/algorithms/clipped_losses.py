"""The clipped surrogate of PPO, on its own: other losses build on it."""

from __future__ import annotations

import torch

from grpo_dist.algorithms.ratios import bounded_exp, clipped_surrogate, masked_inputs, ratio_stats
from grpo_dist.algorithms.shapes import LossAndStats, Number, TokenMask, TokenValues


def ppo_clip(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    clip_low: Number = 0.2, clip_high: Number = 0.2, dual_clip: Number | None = None,
) -> LossAndStats:  # fmt: skip
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7); separate bounds as in DAPO (arXiv:2503.14476,
    section 3.1). With ``dual_clip`` c > 1, a token with A < 0 costs at most -c A (Ye et al. 2020,
    arXiv:1912.09729); off by default.

    Args:
        logprobs: nats, of the weights being trained.
        old_logprobs: nats, of the weights the ratio is taken to; no gradient flows into them.
        mask: tokens that count.

    Returns:
        Losses, 0 where masked; and stats, with tokens whose gradient a bound removed as ``clip_low``,
        ``clip_high`` and ``dual_clip``.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    # A token with A < 0 and no dual clip has no bound on a large ratio.
    unbounded = (advantages < 0) if dual_clip is None else torch.zeros_like(mask)
    ratio = bounded_exp(log_ratio, unbounded)
    losses, low, high = clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    capped = None
    if dual_clip is not None:
        cap = -dual_clip * advantages
        capped = (advantages < 0) & (losses > cap)
        losses = torch.where(capped, cap, losses)
    return torch.where(mask, losses, 0.0), ratio_stats(log_ratio, mask, low=low, high=high, capped=capped)
