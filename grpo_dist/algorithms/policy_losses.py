"""Per-token policy losses. Each returns losses [B, T], to be aggregated elsewhere, and statistics to be added
up (`ratios.ratio_stats`).

All take log-probs in nats, advantages and a mask; what stands where the mask is False, NaN included, reaches
neither loss nor gradient. Keywords are the settings of a loss, as in `config.algorithm`. clip_cov and kl_cov
also take which tokens were selected over the whole update, gmpo which tokens no rule removed.

    loss             ratio            what bounds a step
    policy_gradient  none, always 1   nothing: on-policy
    ppo_clip         token            no gain beyond 1 - clip_low and 1 + clip_high
    cispo            token            the weight, held inside the bounds; every token keeps its gradient
    sapo             token            a sigmoid gate instead of an edge
    dppo_tv, dppo_kl token            how far the token's probability moved, not its ratio
    gspo             sequence         as ppo_clip, by the geometric mean of the sequence
    gspo_segment     action           as gspo, by that of an action of the sequence
    gmpo             token, sequence  log-ratios clipped by token, their mean taken by sequence
    dro, kimi15      none             a penalty on the squared log-ratio, of the token or the sequence
    topr             sequence         the weight of bad samples, at most 1; topr_token: of their tokens
    reinforce_is     sequence         the weight, at most a cap
    vespo            sequence         a weight that falls to 0 on both sides of 1
    clip_cov         token            as ppo_clip, without some tokens of high covariance
    kl_cov           token            a penalty on the tokens of the highest covariance
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_dist.algorithms.clipped_losses import ppo_clip
from grpo_dist.algorithms.covariance import clip_cov, kl_cov
from grpo_dist.algorithms.dppo import dppo_kl, dppo_tv
from grpo_dist.algorithms.penalised_losses import dro, kimi15
from grpo_dist.algorithms.ratios import (
    LOG_LIMIT,
    masked_inputs,
    masked_logprobs,
    ratio_stats,
)
from grpo_dist.algorithms.sequence_losses import gmpo, gspo, gspo_segment
from grpo_dist.algorithms.shapes import LossAndStats, Number, Stats, TokenMask, TokenValues
from grpo_dist.algorithms.tapered_losses import reinforce_is, topr, topr_token, vespo


def policy_gradient(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask
) -> LossAndStats:
    """REINFORCE: the value is -A, the gradient -A grad log pi; Williams 1992. ``old_logprobs`` are only
    compared with.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    unmoved, _ = masked_inputs(logprobs, logprobs, advantages, mask)
    return -unmoved.exp() * advantages, ratio_stats(log_ratio, mask)


def cispo(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    clip_low: Number = 1.0, clip_high: Number = 0.2, unified_mask: bool = False,
) -> LossAndStats:  # fmt: skip
    """-stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: the weight is bounded, no token is lost.

    MiniMax-M1 (arXiv:2506.13585), equations 4 and 5; the paper has no lower bound, which is ``clip_low`` 1.
    ``unified_mask`` (equations 6 and 7) drops the tokens that PPO drops: A > 0 beyond the upper bound, A < 0
    beyond the lower one.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    ratio = log_ratio.detach().clamp(max=LOG_LIMIT).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    if unified_mask:
        low, high = low & (advantages < 0), high & (advantages > 0)
        weight = torch.where(low | high, 0.0, weight)
    losses = -weight * advantages * masked_logprobs(logprobs, mask)
    return losses, ratio_stats(log_ratio, mask, low=low, high=high)


def sapo(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    tau_positive: Number = 1.0, tau_negative: Number = 1.05,
) -> LossAndStats:  # fmt: skip
    """-4 / tau sigmoid(tau (r - 1)) A: on-policy the gradient of PPO, fading smoothly as r leaves 1.

    SAPO (Gao et al. 2025, arXiv:2511.20347), equations 5 to 7; ``tau`` by the sign of the advantage.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    tau = torch.full_like(log_ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (log_ratio.clamp(max=LOG_LIMIT).exp() - 1)) * 4 / tau
    return -gate * advantages, ratio_stats(log_ratio, mask)


POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Stats]]] = {
    "policy_gradient": policy_gradient,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gspo": gspo,
    "gspo_segment": gspo_segment,
    "gmpo": gmpo,
    "dro": dro,
    "kimi15": kimi15,
    "topr": topr,
    "topr_token": topr_token,
    "reinforce_is": reinforce_is,
    "vespo": vespo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
