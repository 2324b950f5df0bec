"""Importance weights for off-policy samples: from an engine with other numerics, or from older weights.

With w = exp(train - rollout), the sampled tokens' probability under the trainer over their probability under
the rollout engine:

    kind     weight of a token
    tis      w clamped to [low, high]: truncated importance sampling (Yao et al. 2025, "Your efficient RL
             framework secretly brings you off-policy RL training")
    mis      w inside [low, high], else 0: masked importance sampling (Liu et al. 2025, "When speed kills
             stability")
    icepop   the token's own ratio where w is inside [low, high], else 0: IcePop (Ling team 2025, "Every step
             evolves", arXiv:2510.18855); at token level the same as mis

    level     w is taken over
    token     the token alone
    sequence  the product over the sequence
    geometric the geometric mean over the sequence (GSPO's ratio, arXiv:2507.18071)
    segment   the geometric mean over neighbouring tokens that the policy sampled: an action of an episode
              (ROLL's segment); a sequence without given tokens is one action

``veto`` drops a whole sequence for one token that the trainer finds all but impossible: a sign that engine
and trainer do not run the same model there (Liu et al. 2025, as above).

A sequence with an unmasked token whose log-prob is NaN is dropped too, under every kind and level: its
sampling distribution is unknown.

Rejection rules choose which tokens stay in the policy loss: hard limits on how far the trainer is from the
sampling policy. With d = train - rollout of a token, in nats:

    k1          exp(d), a ratio: between ``low`` and ``high``     verl's bounds are of its inverse
    k2          d^2 / 2
    k3          exp(d) - 1 - d
    binary_kl   KL(rollout, train) of "this token or another"      DPPO's, `kl.binary_kl`
    tv          |exp(train) - exp(rollout)|                        DPPO's, `kl.total_variation`

A rule takes one of them over the token, or their sum, mean or largest over the sequence, or their mean over a
segment; k1 over a sequence is the product or the geometric mean of its ratios. All but k1 are at most
``high``. A token stays if every rule accepts it; the rules of a sequence accept all of it or nothing.

Names and divergences follow verl's rollout correction and Liu et al. 2025, "When speed kills stability"; the
gates are DPPO's (arXiv:2602.04879).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_dist.algorithms.kl import binary_kl, total_variation
from grpo_dist.algorithms.ratios import segment_mean, sequence_mean


@torch.no_grad()
def correction(
    train_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    kind: Literal["tis", "mis", "icepop"],
    level: Literal["token", "sequence", "geometric", "segment"],
    low: float | int,
    high: float | int,
    veto: float | int = 0.0,
) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
    """Return weights for the policy loss (never for a KL term); no gradient flows through them.

    Args:
        train_logprobs: nats, from the trainer's old weights, the denominator of the policy loss's ratio.
        rollout_logprobs: nats, as the engine sampled.
        kind, level: see the top of this module.
        low, high: inclusive bounds of the weight, 0 <= low < high.
        veto: a sequence with a token ratio below this gets weight 0 throughout; 0: no veto.

    Returns:
        Weights, 0 where masked; and sums over unmasked tokens: ``weight`` (before bounds), its square
        ``weight_sq``, ``weight_max``, ``outside`` (tokens whose weight lay outside the bounds), ``dropped``
        (tokens whose returned weight is 0). Tokens of sequences with a NaN count in the last two only.
        Weights are computed in float64, so that a product over a long sequence does not depend on the order
        of its factors, and returned in the type of ``train_logprobs``. Bounds and veto compare logarithms.
        log w is clamped only from above, where exp overflows: the loss multiplies a tiny weight by a ratio. A
        weight is 0 only where a token is dropped; an underflowing weight becomes `_least`.
    """
    zero = torch.zeros((), dtype=torch.float64, device=train_logprobs.device)
    log_token = torch.where(mask, train_logprobs.double() - rollout_logprobs.double(), zero)
    log_ratio = _reduce(level, log_token, mask)
    has_logprobs = ~(log_token + log_ratio).isnan().any(dim=1, keepdim=True).expand_as(mask)
    log_token, log_ratio = (
        torch.where(has_logprobs, log_token, zero),
        torch.where(has_logprobs, log_ratio, zero),
    )
    largest = math.log(torch.finfo(train_logprobs.dtype).max) - 1
    low, high = float(low), min(float(high), math.exp(largest))
    ratio = log_ratio.clamp(max=largest).exp()
    below, above = log_ratio < _log(low), log_ratio > _log(high)
    outside = ~has_logprobs | below | above
    if kind == "tis":
        weights = torch.where(below, low, torch.where(above, high, ratio))
    else:
        weights = ratio if kind == "mis" else log_token.clamp(max=largest).exp()
    vetoed = (mask & (log_token < _log(veto))).any(dim=1, keepdim=True)
    kept = mask & has_logprobs & ~vetoed & (~outside | (kind == "tis"))
    weights = torch.where(kept, weights.clamp(min=_least(train_logprobs)), zero).to(train_logprobs.dtype)
    counted = torch.where(mask & has_logprobs, ratio, zero)
    stats = {
        "weight": counted.sum(),
        "weight_sq": counted.square().sum(),
        "dropped": (mask & (weights == 0)).sum(),
        "weight_max": counted.max() if mask.numel() else zero,
        "outside": (mask & outside).sum(),
    }
    return weights, stats


def mean_weight_sums(
    weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, level: str
) -> tuple[float, float]:
    """Return sum and count of these rows' weights; their quotient over all rows of an update is the mean
    weight. Levels token and segment have one weight per unmasked token, the others one per sequence.

    Dividing by it is self-normalised importance sampling (verl's ``rollout_is_batch_normalize``): the size of
    a step then does not depend on how far the engine is from the trainer.
    """
    counts = mask.sum(dim=1)
    sums = torch.where(mask, weights.double(), 0.0).sum(dim=1)
    if level in ("token", "segment"):
        return float(sums.sum()), float(counts.sum())
    return float((sums / counts.clamp(min=1)).sum()), float((counts > 0).sum())


def _reduce(level: str, log_token: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return the log-ratios at ``level``. ``log_token`` is 0 where masked."""
    if level == "token":
        return log_token
    if level == "segment":
        return segment_mean(log_token, mask)
    total = log_token.sum(dim=1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return total.expand_as(log_token)


def _least(values: Float[Tensor, "B T"]) -> float:
    """Return the least number above 0 of the dtype of ``values``.

    A weight of 0 means "dropped". An underflowing weight is not dropped: times an overflowing ratio it must
    not be 0.
    """
    number = torch.finfo(values.dtype)
    return number.tiny * number.eps


def _log(bound: float | int) -> float:
    """Return the logarithm, -inf for 0: nothing is below it."""
    return math.log(bound) if bound > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """``rule``: one of `RULES`. ``low``: for k1 only. None: no bound on that side."""

    rule: str
    high: float | None = None
    low: float | None = None


@torch.no_grad()
def accepted(
    train_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    rules: Sequence[RejectionRule],
    *,
    veto: float | int = 0.0,
) -> Bool[Tensor, "B T"]:
    """Return the unmasked tokens that every one of ``rules`` accepts.

    Args:
        train_logprobs: nats, from the trainer.
        rollout_logprobs: nats, as the engine sampled. Every rule rejects a token with NaN, and sequence rules
            reject its whole sequence.
        veto: a sequence with a token ratio exp(d) below this is rejected; 0: no veto.
    """
    train, rollout = (torch.where(mask, v.double(), 0.0) for v in (train_logprobs, rollout_logprobs))
    keep = mask.clone()
    for rule in rules:
        reduce, divergence = RULES[rule.rule]
        values = reduce(torch.where(mask, divergence(train, rollout), 0.0), mask)
        is_ratio = rule.rule.endswith("_k1")
        if rule.high is not None:
            keep &= values <= (_log(rule.high) if is_ratio else rule.high)
        if rule.low is not None:
            keep &= values >= (_log(rule.low) if is_ratio else rule.low)
    if veto:
        keep &= ~(mask & ~(train - rollout >= _log(veto))).any(dim=1, keepdim=True)
    return keep


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs: Float[Tensor, "B T"],
    sampler_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    threshold: float | int,
) -> Bool[Tensor, "B T"]:
    """Return the unmasked tokens except tokens with A < 0 in far off-policy sequences: the mean of log p of
    the sampler minus log p of the policy is above ``threshold``, nats per token.

    DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, equations 8 and 9; TRL's ``off_policy_mask_threshold``.
    Stale bad samples teach nothing and destabilise training; good ones stay.
    """
    gap = torch.where(mask, sampler_logprobs.double() - logprobs.double(), 0.0)
    is_near = sequence_mean(gap, mask) <= threshold
    return mask & ((torch.where(mask, advantages, 0.0) >= 0) | is_near)


def _k3(train: Tensor, rollout: Tensor) -> Tensor:
    return torch.expm1(train - rollout) - (train - rollout)


_DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda train, rollout: train - rollout,
    "k2": lambda train, rollout: (train - rollout).square() / 2,
    "k3": _k3,
    "binary_kl": lambda train, rollout: binary_kl(rollout, train),
    "tv": lambda train, rollout: total_variation(rollout, train),
}


def _sequence_max(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B 1"]:
    return torch.where(mask, values, -torch.inf).amax(dim=1, keepdim=True)


# Reductions of token divergences [B, T]: to [B, T], or to [B, 1] for a whole sequence.
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "segment_mean": segment_mean,
    "seq_mean": sequence_mean,
    "seq_sum": lambda values, mask: values.sum(dim=1, keepdim=True),
    "seq_max": _sequence_max,
}
RULES = {
    f"{scope}_{name}": (over, divergence)
    for scope, over in _REDUCTIONS.items()
    for name, divergence in _DIVERGENCES.items()
    if (scope, name) != ("seq_max", "k1")
}
