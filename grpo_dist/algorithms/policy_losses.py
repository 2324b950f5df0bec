"""Per-token policy losses. Each returns losses [B, T], aggregated elsewhere, and statistics that add up over
rows (`ratios.ratio_stats`).

All take log-probs in nats, advantages and a mask; values where the mask is False, NaN included, reach neither
loss nor gradient. Keywords are the settings of a loss, as in `config.algorithm`. clip_cov and kl_cov also
take the tokens selected over the whole update, gmpo the tokens that no rule removed.

    loss             ratio            what bounds a step
    policy_gradient  none, always 1   nothing: on-policy
    ppo_clip         token            no gain beyond 1 - clip_low and 1 + clip_high
    cispo            token            the weight, clipped to the bounds; every token keeps its gradient
    sapo             token            a sigmoid gate instead of an edge
    dppo_tv, dppo_kl token            how far the token's probability moved, not its ratio
    gspo             sequence         as ppo_clip, by the geometric mean of the sequence
    gspo_segment     action           as gspo, by the geometric mean of an action
    gmpo             token, sequence  log-ratios clipped by token, their mean taken by sequence
    dro, kimi15      none             a penalty on the squared log-ratio, of the token or the sequence
    topr             sequence         the weight of bad samples, at most 1; topr_token: of their tokens
    reinforce_is     sequence         the weight, at most a cap
    vespo            sequence         a weight that falls to 0 on both sides of 1
    clip_cov         token            as ppo_clip, without some tokens of high covariance
    kl_cov           token            a penalty on the tokens of the highest covariance

d = log pi - log pi_old, D its sum over the sequence, w = exp(D):

                  penalty of a token             gradient of the penalty at a token
    dro           beta / 2 * d_t^2               beta * d_t
    kimi15        tau / 2 * D * d_t              tau * D

                  ratio      weight where A >= 0        weight where A < 0, without a gradient
    topr          sequence   1                          min(w, 1)
    topr_token    token      1                          min(r, 1)
    reinforce_is  sequence   min(w, cap)                the same
    vespo         sequence   w^k exp(lambda (1 - w))    the same with other k, lambda

DPPO bounds how far the probability of a token moved from p to q: a ratio says little.

                             ratio   |q - p|   KL(p, q) of the binary distributions
    0.001 -> 0.002           2       0.001     0.0003
    0.4   -> 0.8             2       0.4       0.3819
    0.99  -> 0.5             0.505   0.49      0.6371

A loss whose ratio belongs to the sequence or an action gives it to each token, so every aggregation works;
the papers' objectives use ``seq-mean-token-mean``. dro and kimi15 are meant for off-policy samples: they have
no importance ratio, so nothing is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_dist.algorithms.kl import binary_kl, total_variation
from grpo_dist.algorithms.ratios import (
    LOG_LIMIT,
    LossAndStats,
    Number,
    Stats,
    TokenMask,
    TokenValues,
    bounded_exp,
    clipped_surrogate,
    masked_inputs,
    masked_logprobs,
    ratio_stats,
    segment_mean,
    sequence_mean,
)

# Range of a sequence's log-ratio, nats: beyond it the weight of vespo is almost 0.
_LOG_RANGE = (math.log(1e-8), 20.0)


def policy_gradient(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask
) -> LossAndStats:
    """REINFORCE: the value is -A, the gradient -A grad log pi; Williams 1992. ``old_logprobs`` only enter the
    statistics.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    unmoved, _ = masked_inputs(logprobs, logprobs, advantages, mask)
    return -unmoved.exp() * advantages, ratio_stats(log_ratio, mask)


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
    masked = masked_logprobs(logprobs, mask)
    with torch.no_grad():
        divergence = divergence_of(masked_logprobs(old_logprobs, mask), masked)
        low = (advantages < 0) & (log_ratio < 0) & (divergence > clip_low)
        high = (advantages > 0) & (log_ratio > 0) & (divergence > clip_high)
        weight = log_ratio.clamp(max=LOG_LIMIT).exp().clamp(max=ratio_cap)
        weight = torch.where(low | high, 0.0, weight)
    losses = -weight * advantages * masked
    return losses, ratio_stats(log_ratio, mask, low=low, high=high)


def gspo(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    clip_low: Number = 3e-4, clip_high: Number = 4e-4,
) -> LossAndStats:  # fmt: skip
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with s the geometric mean of the token ratios.

    GSPO (Zheng et al. 2025, arXiv:2507.18071), in its token form, equations 13 and 14: the value of s is the
    sequence's, its gradient flows through the token's own log-prob. With one advantage per sequence the
    gradient equals the sequence form's under every aggregation; with token advantages it stays defined.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    mean = sequence_mean(log_ratio, mask).expand_as(log_ratio)
    return _clip_mean_ratio(mean, log_ratio, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def gspo_segment(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    clip_low: Number = 0.2, clip_high: Number = 0.2,
) -> LossAndStats:  # fmt: skip
    """As `gspo` with s the geometric mean over a run of neighbouring unmasked tokens: an action of an
    episode, between two observations. A sequence without given tokens is one action.

    It is ROLL's ``ratio_type: segment`` of agentic training, with its bounds, and the token form's gradient.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    mean = segment_mean(log_ratio.detach(), mask)
    return _clip_mean_ratio(mean, log_ratio, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def _clip_mean_ratio(
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
    """-A times the geometric mean of the token ratios, each clipped before the mean is taken.

    GMPO (Zhao et al. 2025, arXiv:2507.20673), equation 4. The bounds are on log r: above ``clip_high`` where
    A > 0, below -``clip_low`` where A < 0 (the paper clips r to exp(-0.4) and exp(0.4)).

    ``kept``: tokens in the mean, which no rule or cut removed; None: all of ``mask``. A removed token gets no
    gradient through the mean. With no token kept the mean is 1.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    low, high = (advantages < 0) & (log_ratio < -clip_low), (advantages > 0) & (log_ratio > clip_high)
    clipped = torch.where(high, clip_high, torch.where(low, -clip_low, log_ratio))
    mean_mask = mask if kept is None else mask & kept
    mean = sequence_mean(torch.where(mean_mask, clipped, 0.0), mean_mask)
    ratio = bounded_exp(mean.expand_as(clipped), advantages != 0)
    return -ratio * advantages, ratio_stats(log_ratio, mask, low=low, high=high)


def dro(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    beta: Number = 0.1,
) -> LossAndStats:  # fmt: skip
    """-A log pi + beta / 2 (log pi - log pi_old)^2, token by token.

    Direct reward optimisation (Richemond et al. 2024, arXiv:2405.19107) in the token form of Tinker and verl;
    with ``beta`` for tau it is also ROLL's ``kimi15``. The paper's value function is the group's mean here.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * masked_logprobs(logprobs, mask) + beta / 2 * log_ratio.square()
    return losses, ratio_stats(log_ratio, mask)


def kimi15(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    tau: Number = 0.1,
) -> LossAndStats:  # fmt: skip
    """-A log pi + tau / 2 D^2 of the whole sequence, D = sum of log pi - log pi_old.

    Kimi k1.5 (Kimi team 2025, arXiv:2501.12599), equation 3, whose advantage is r - mean of the group
    (``advantage: dr_grpo``). D^2 / 2 is shared out as D d_t / 2, which adds up to it; the gradient at every
    token is tau D, as for the square. Its aggregation is ``seq-mean-token-sum``.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    total = log_ratio.detach().sum(dim=1, keepdim=True)
    penalty = total * (log_ratio - log_ratio.detach() / 2)
    losses = -advantages * masked_logprobs(logprobs, mask) + tau * penalty
    return losses, ratio_stats(log_ratio, mask)


def topr(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask
) -> LossAndStats:
    """-A log pi where A >= 0, -stop_gradient(min(w, 1)) A log pi where A < 0, w the sequence's ratio.

    TOPR, tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv:2503.14286), equation 8: good samples are
    learned as in supervised training, bad ones lose weight as their probability falls, so that nothing pushes
    it down without bound. The sign is the advantage's; the paper's rewards are +1 and -1.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    return _tapered(logprobs, log_ratio, _log_weight(log_ratio), advantages, mask)


def topr_token(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask
) -> LossAndStats:
    """As `topr` with the ratio of each token instead of its sequence's: ROLL's ``pg_variant: topr``, which
    calls a sample bad by its score instead of its advantage.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    return _tapered(logprobs, log_ratio, log_ratio.detach(), advantages, mask)


def _log_weight(log_ratio: TokenValues) -> TokenValues:
    """Return for every token the log of w, its sequence's ratio, without a gradient."""
    return log_ratio.detach().sum(dim=1, keepdim=True).expand_as(log_ratio)


def _tapered(
    logprobs: TokenValues,
    log_ratio: TokenValues,
    log_weight: TokenValues,
    advantages: TokenValues,
    mask: TokenMask,
) -> LossAndStats:
    negative = advantages < 0
    weight = torch.where(negative, log_weight.clamp(max=0.0).exp(), 1.0)
    losses = -weight * advantages * masked_logprobs(logprobs, mask)
    return losses, ratio_stats(log_ratio, mask, high=negative & (log_weight > 0))


def reinforce_is(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    ratio_cap: Number = 2.0,
) -> LossAndStats:  # fmt: skip
    """-stop_gradient(min(w, ratio_cap)) A log pi with w the sequence's ratio.

    REINFORCE with truncated importance sampling over the sequence (Liu et al. 2025, "When speed kills
    stability", section on sequence-level TIS): the unbiased gradient for samples of another policy, with the
    weight cut from above. It is verl's bypass mode with ``loss_type: reinforce`` and ``rollout_is:
    sequence``. The form with the token's own ratio is `cispo` with ``clip_low`` 1, ``clip_high`` cap - 1.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    log_weight = _log_weight(log_ratio)
    weight = log_weight.clamp(max=math.log(ratio_cap)).exp()
    losses = -weight * advantages * masked_logprobs(logprobs, mask)
    return losses, ratio_stats(log_ratio, mask, high=log_weight > math.log(ratio_cap))


def vespo(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    k_positive: Number = 2.0, lambda_positive: Number = 3.0,
    k_negative: Number = 3.0, lambda_negative: Number = 2.0,
) -> LossAndStats:  # fmt: skip
    """-stop_gradient(w^k exp(lambda (1 - w))) A log pi with w the sequence's ratio.

    VESPO (arXiv:2602.10693), section 3.4: the weight is 1 at w = 1, largest at w = k / lambda, and falls to 0
    on both sides, so that sequences far more or far less likely under the policy than when sampled count
    little. ``k`` and ``lambda`` by the sign of the advantage; 0 counts as positive.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    log_weight = _log_weight(log_ratio).clamp(*_LOG_RANGE)
    negative = advantages < 0
    k = torch.full_like(log_ratio, k_positive).masked_fill(negative, k_negative)
    decay = torch.full_like(log_ratio, lambda_positive).masked_fill(negative, lambda_negative)
    weight = (decay + k * log_weight - decay * log_weight.exp()).exp()
    losses = -weight * advantages * masked_logprobs(logprobs, mask)
    return losses, ratio_stats(log_ratio, mask)


def clip_cov(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask,
    selected: TokenMask | None = None, *, clip_low: Number = 0.2, clip_high: Number = 0.2,
) -> LossAndStats:  # fmt: skip
    """`ppo_clip` without the ``selected`` tokens; None: none. Equation 12 of the paper."""
    losses, stats = ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    chosen = _mask_selected(selected, mask)
    return torch.where(chosen, 0.0, losses), stats | {"selected": chosen.sum()}


def kl_cov(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask,
    selected: TokenMask | None = None, *, cov_kl_coef: Number = 1.0,
) -> LossAndStats:  # fmt: skip
    """-r A, and for the ``selected`` tokens + cov_kl_coef |log r|; None: no such tokens. Equation 13.

    Nothing bounds the ratio of the other tokens: the penalty keeps the policy from collapsing.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    ratio, chosen = bounded_exp(log_ratio, advantages != 0), _mask_selected(selected, mask)
    losses = torch.where(chosen, cov_kl_coef * log_ratio.abs(), 0.0) - ratio * advantages
    return torch.where(mask, losses, 0.0), ratio_stats(log_ratio, mask) | {"selected": chosen.sum()}


def _mask_selected(selected: TokenMask | None, mask: TokenMask) -> TokenMask:
    return torch.zeros_like(mask) if selected is None else mask & selected


POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Stats]]] = {
    loss.__name__: loss
    for loss in (
        policy_gradient, ppo_clip, cispo, sapo, dppo_tv, dppo_kl, gspo, gspo_segment, gmpo, dro, kimi15, topr,
        topr_token, reinforce_is, vespo, clip_cov, kl_cov,
    )
}  # fmt: skip
