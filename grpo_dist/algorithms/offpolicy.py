"""Importance weights for samples that another distribution drew: an engine that computes otherwise, or older
weights.

With w = exp(train - rollout), the probability of what was sampled under the trainer over that under the
rollout engine:

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
              (ROLL's segment); a sequence without given tokens is one

``veto`` drops a whole sequence for one token that the trainer finds all but impossible: a sign that engine
and trainer do not run the same model there (Liu et al. 2025, as above).

A sequence with an unmasked token whose log-prob is NaN is dropped too, under every kind and level: what the
engine sampled it from is not known.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_dist.algorithms.segments import segment_mean

KINDS = ("tis", "mis", "icepop")
LEVELS = ("token", "sequence", "geometric", "segment")


@torch.no_grad()
def correction(
    train_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    kind: str,
    level: str,
    low: float | int,
    high: float | int,
    veto: float | int = 0.0,
) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
    """Weights for the policy loss (never for a KL term); no gradient flows through them.

    Args:
        train_logprobs: nats, the trainer's, of the weights that the importance ratio of the policy loss
            starts from.
        rollout_logprobs: nats, as the engine sampled.
        kind, level: see the top of this module.
        low, high: bounds of the weight, themselves allowed, 0 <= low < high.
        veto: a sequence with a token whose own ratio is below this gets weight 0 throughout; 0: no veto.

    Returns:
        Weights, 0 where masked; and sums over unmasked tokens: ``weight`` (before bounds), its square
        ``weight_sq``, ``weight_max``, ``outside`` (tokens whose weight lay outside the bounds), ``dropped``
        (tokens whose returned weight is 0). Tokens of sequences with a NaN count in the last two only.
        Weights are computed in float64, so that a product over a long sequence does not depend on the order
        of its factors, and returned in the type of ``train_logprobs``. Bounds and veto compare logarithms.
        log w is cut from above only, where exp overflows: the loss multiplies a tiny weight by a ratio. A
        weight is 0 only where a token is dropped; one that underflows is `_least`.

    Raises:
        ValueError: unknown kind or level, or bounds out of order.
    """
    _check(kind, level, low, high)
    zero = torch.zeros((), dtype=torch.float64, device=train_logprobs.device)
    log_token = torch.where(mask, train_logprobs.double() - rollout_logprobs.double(), zero)
    log_ratio = _over(level, log_token, mask)
    known = ~(log_token + log_ratio).isnan().any(dim=1, keepdim=True).expand_as(mask)
    log_token, log_ratio = torch.where(known, log_token, zero), torch.where(known, log_ratio, zero)
    largest = math.log(torch.finfo(train_logprobs.dtype).max) - 1
    low, high = float(low), min(float(high), math.exp(largest))
    ratio = log_ratio.clamp(max=largest).exp()
    below, above = log_ratio < _log(low), log_ratio > _log(high)
    outside = ~known | below | above
    if kind == "tis":
        weights = torch.where(below, low, torch.where(above, high, ratio))
    else:
        weights = ratio if kind == "mis" else log_token.clamp(max=largest).exp()
    vetoed = (mask & (log_token < _log(veto))).any(dim=1, keepdim=True)
    kept = mask & known & ~vetoed & (~outside | (kind == "tis"))
    weights = torch.where(kept, weights.clamp(min=_least(train_logprobs)), zero).to(train_logprobs.dtype)
    counted = torch.where(mask & known, ratio, zero)
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
    """Return sum and count of the weights of these rows; their quotient over all rows of an update is the
    mean weight: one for each unmasked token at levels token and segment, one for each sequence at the others.

    Dividing by it is self-normalised importance sampling (verl's ``rollout_is_batch_normalize``): the size of
    a step then does not depend on how far the engine is from the trainer.
    """
    counts = mask.sum(dim=1)
    sums = torch.where(mask, weights.double(), 0.0).sum(dim=1)
    if level in ("token", "segment"):
        return float(sums.sum()), float(counts.sum())
    return float((sums / counts.clamp(min=1)).sum()), float((counts > 0).sum())


def _check(kind: str, level: str, low: float | int, high: float | int) -> None:
    if kind not in KINDS or level not in LEVELS:
        raise ValueError(
            f"correction kind {kind!r}, level {level!r}: expected kind {', '.join(KINDS)} and level "
            f"{', '.join(LEVELS)}"
        )
    if not 0 <= low < high:
        raise ValueError(f"correction bounds low = {low}, high = {high}: expected 0 <= low < high")


def _over(level: str, log_token: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
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
    """Return the least number above 0 of their type.

    A weight of 0 means "dropped". One that underflows is not: times a ratio that overflows it must not be 0.
    """
    number = torch.finfo(values.dtype)
    return number.tiny * number.eps


def _log(bound: float | int) -> float:
    """-inf for 0: then nothing is below it."""
    return math.log(bound) if bound > 0 else -math.inf
