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

``veto`` drops a whole sequence for one token that the trainer finds all but impossible: a sign that engine
and trainer do not run the same model there (Liu et al. 2025, as above).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

KINDS = ("tis", "mis", "icepop")
LEVELS = ("token", "sequence", "geometric")
_LOG_LIMIT = 20.0  # |log w| beyond which exp is not asked: 5e8 is past every bound that makes sense


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
        (tokens whose returned weight is 0). Weights are computed in float64, so that a
        product over a long sequence does not depend on the order of its factors, and returned in the type of
        ``train_logprobs``. |log w| is cut at 20 nats before exp.

    Raises:
        ValueError: unknown kind or level, or bounds out of order.
    """
    if kind not in KINDS or level not in LEVELS:
        raise ValueError(
            f"correction kind {kind!r}, level {level!r}: expected kind {', '.join(KINDS)} and level "
            f"{', '.join(LEVELS)}"
        )
    if not 0 <= low < high:
        raise ValueError(f"correction bounds low = {low}, high = {high}: expected 0 <= low < high")
    zero = torch.zeros((), dtype=torch.float64, device=train_logprobs.device)
    log_ratio = torch.where(mask, train_logprobs.double() - rollout_logprobs.double(), zero)
    token_ratio = _exp(log_ratio)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    elif level == "geometric":
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(log_ratio)
    ratio = _exp(log_ratio)
    inside = (ratio >= low) & (ratio <= high)
    if kind == "tis":
        weights = ratio.clamp(low, high)
    elif kind == "mis":
        weights = torch.where(inside, ratio, zero)
    else:
        weights = torch.where(inside, token_ratio, zero)
    if veto > 0:
        vetoed = (mask & (token_ratio < veto)).any(dim=1, keepdim=True)
        weights = torch.where(vetoed, zero, weights)
    stats = {
        "weight": torch.where(mask, ratio, zero).sum(),
        "weight_sq": torch.where(mask, ratio.square(), zero).sum(),
        "dropped": (mask & (weights == 0)).sum(),
        "weight_max": torch.where(mask, ratio, zero).max() if mask.numel() else zero,
        "outside": (mask & ~inside).sum(),
    }
    return torch.where(mask, weights, zero).to(train_logprobs.dtype), stats


def _exp(log_ratio: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return log_ratio.clamp(-_LOG_LIMIT, _LOG_LIMIT).exp()
