"""Per-token policy losses. Each returns losses [B, T] to be aggregated elsewhere, and statistics to be added
up.

Statistics are sums over unmasked tokens, or maxima where the name ends in ``_max``: they combine exactly over
micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Stats = dict[str, Tensor]
_LOG_LIMIT = 60.0  # nats; exp of it, 1e26, is past every bound on a ratio and far from overflowing float32


def ppo_clip(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_low: float | int = 0.2,
    clip_high: float | int = 0.2,
    dual_clip: float | int | None = None,
) -> tuple[Float[Tensor, "B T"], Stats]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7); separate bounds as in DAPO (arXiv:2503.14476,
    section 3.1). With ``dual_clip`` c > 1, a token with A < 0 costs at most -c A (Ye et al. 2020,
    arXiv:1912.09729); off by default.

    Args:
        logprobs: nats, of the weights being trained.
        old_logprobs: nats, of the weights the ratio is taken to; no gradient flows into them.
        mask: tokens that count. What stands elsewhere, NaN included, reaches neither loss nor gradient.

    Returns:
        Losses, 0 where masked; and stats ``ratio``, ``ratio_max``, ``clip_low``, ``clip_high``, ``dual_clip``
        (tokens whose gradient the bound removed), ``approx_kl`` (k3 of old to new, nats).
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    log_ratio = torch.where(mask, logprobs, zero) - torch.where(mask, old_logprobs.detach(), zero)
    advantages = torch.where(mask, advantages.to(logprobs.dtype), zero)
    # Where a bound makes the loss constant in a large ratio, the ratio must not overflow: 0 * inf is NaN in
    # the backward pass. A token with A < 0 and no dual clip has no such bound; it keeps its gradient.
    unbounded = (advantages < 0) if dual_clip is None else torch.zeros_like(mask)
    ratio = torch.where(unbounded, log_ratio, log_ratio.clamp(max=_LOG_LIMIT)).exp()
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = torch.maximum(plain, clipped)
    capped = torch.zeros_like(mask)
    if dual_clip is not None:
        cap = -dual_clip * advantages
        capped = (advantages < 0) & (losses > cap)
        losses = torch.where(capped, cap, losses)
    with torch.no_grad():
        stats = {
            "ratio": torch.where(mask, ratio, zero).sum(),
            "ratio_max": torch.where(mask, ratio, zero).max() if mask.numel() else zero,
            "clip_low": (mask & (advantages < 0) & (ratio < 1 - clip_low)).sum(),
            "clip_high": (mask & (advantages > 0) & (ratio > 1 + clip_high)).sum(),
            "dual_clip": capped.sum(),
            "approx_kl": torch.where(mask, torch.expm1(log_ratio) - log_ratio, zero).sum(),
        }
    return torch.where(mask, losses, zero), stats


POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Stats]]] = {"ppo_clip": ppo_clip}
