"""Which tokens stay in the policy loss: hard limits on how far the trainer is from what sampled them.

With d = train - rollout of a token, in nats:

    k1          exp(d), a ratio: between ``low`` and ``high``     verl's bounds are of its inverse
    k2          d^2 / 2
    k3          exp(d) - 1 - d
    binary_kl   KL(rollout, train) of "this token or another"      DPPO's, `dppo.binary_kl`
    tv          |exp(train) - exp(rollout)|                        DPPO's, `dppo.total_variation`

A rule takes one of them over the token, or their sum, mean or largest over the sequence, or their mean over a
segment (`segments`); k1 over a sequence is the product or the geometric mean of its ratios. All but k1 are at
most ``high``. A token stays if every rule accepts it; the rules of a sequence accept all of it or nothing.

Names and divergences are those of verl's rollout correction and of Liu et al. 2025, "When speed kills
stability"; the gates are DPPO's (arXiv:2602.04879).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_dist.algorithms.dppo import binary_kl, total_variation
from grpo_dist.algorithms.ratios import sequence_mean
from grpo_dist.algorithms.segments import segment_mean

DIVERGENCES = ("k1", "k2", "k3", "binary_kl", "tv")
SCOPES = ("token", "segment_mean", "seq_mean", "seq_sum", "seq_max")
RULES = tuple(
    f"{scope}_{name}" for scope in SCOPES for name in DIVERGENCES if (scope, name) != ("seq_max", "k1")
)


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """``rule``: one of `RULES`. ``low``: of k1 alone. None: no bound on that side."""

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
        train_logprobs: nats, the trainer's.
        rollout_logprobs: nats, as the engine sampled. A sequence with one that is NaN is never accepted by
            a rule of sequences, and its token by none.
        veto: a sequence with a token whose own ratio exp(d) is below this is not accepted; 0: no veto.

    Raises:
        ValueError: an unknown rule.
    """
    train, rollout = (torch.where(mask, v.double(), 0.0) for v in (train_logprobs, rollout_logprobs))
    keep = mask.clone()
    for rule in rules:
        if rule.rule not in RULES:
            raise ValueError(f"rejection rule {rule.rule!r}: expected one of {', '.join(RULES)}")
        scope, name = next((s, rule.rule[len(s) + 1 :]) for s in SCOPES if rule.rule.startswith(f"{s}_"))
        values = _OVER[scope](torch.where(mask, _DIVERGENCES[name](train, rollout), 0.0), mask)
        of_ratio = name == "k1"
        if rule.high is not None:
            keep &= values <= (_log(rule.high) if of_ratio else rule.high)
        if rule.low is not None:
            keep &= values >= (_log(rule.low) if of_ratio else rule.low)
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
    """Return the unmasked tokens without those of A < 0 in sequences that the policy has left: the mean of
    log p of the sampler minus log p of the policy is above ``threshold``, nats per token.

    DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, equations 8 and 9; TRL's ``off_policy_mask_threshold``. Bad
    samples that are no longer the policy's own teach it nothing and upset training; good ones stay.
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


# Of a token's divergences: [B, T], or [B, 1] for a whole sequence.
_OVER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "segment_mean": segment_mean,
    "seq_mean": sequence_mean,
    "seq_sum": lambda values, mask: values.sum(dim=1, keepdim=True),
    "seq_max": _sequence_max,
}


def _log(bound: float | int) -> float:
    """-inf for 0: nothing is below it."""
    return math.log(bound) if bound > 0 else -math.inf
