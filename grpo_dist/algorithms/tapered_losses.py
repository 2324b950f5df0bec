"""Policy losses that weigh the log-likelihood by a function of the importance ratio, which may depend on the
sign of the advantage. No gradient flows through the weight.

                  ratio      weight where A >= 0        weight where A < 0
    topr          sequence   1                          min(w, 1)
    topr_token    token      1                          min(r, 1)
    reinforce_is  sequence   min(w, cap)                the same
    vespo         sequence   w^k exp(lambda (1 - w))    the same with other k, lambda

w is the product of a sequence's token ratios r.
"""

from __future__ import annotations

import math

import torch

from grpo_dist.algorithms.ratios import masked_inputs, masked_logprobs, ratio_stats
from grpo_dist.algorithms.shapes import LossAndStats, Number, TokenMask, TokenValues

# Of a sequence's log-ratio, in nats: beyond it the weight of vespo is all but 0.
_LOG_RANGE = (math.log(1e-8), 20.0)


def topr(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask
) -> LossAndStats:
    """-A log pi where A >= 0, -stop_gradient(min(w, 1)) A log pi where A < 0, w the sequence's ratio.

    TOPR, tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv:2503.14286), equation 8: good samples are
    learned as in supervised training, bad ones lose weight as the policy leaves them, so that nothing pushes
    their probability without a bound. The sign is that of the advantage; the paper's rewards are +1 and -1.
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
    on both sides, so that no sequence counts much that the policy finds far more or far less likely than the
    one that sampled. ``k`` and ``lambda`` by the sign of the advantage; 0 counts as positive.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    log_weight = _log_weight(log_ratio).clamp(*_LOG_RANGE)
    negative = advantages < 0
    k = torch.full_like(log_ratio, k_positive).masked_fill(negative, k_negative)
    decay = torch.full_like(log_ratio, lambda_positive).masked_fill(negative, lambda_negative)
    weight = (decay + k * log_weight - decay * log_weight.exp()).exp()
    losses = -weight * advantages * masked_logprobs(logprobs, mask)
    return losses, ratio_stats(log_ratio, mask)
