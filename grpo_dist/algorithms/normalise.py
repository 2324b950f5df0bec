"""Rewards before an estimator, and advantages after it: shifted, scaled, whitened."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_dist.algorithms.groups import Groups

OVER = ("none", "group", "batch")


def normalise_rewards(
    rewards: Float[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    over: str,
    shift: bool = True,
    scale: bool = True,
    eps: float | int = 1e-6,
) -> Float[Tensor, " B"]:
    """(r - mean) / (sample deviation + eps) over the ``group`` or the whole ``batch``.

    ``shift`` False leaves the mean in, ``scale`` False the deviation; ``over`` none changes nothing. NaN
    stays NaN and leaves the statistics. Fewer than two scored samples have deviation 0.

    Raises:
        ValueError: ``over`` is none of the three.
    """
    if over not in OVER:
        raise ValueError(f"reward_norm = {over!r}: expected {', '.join(OVER)}")
    if over == "none":
        return rewards
    ids = group_ids if over == "group" else torch.zeros_like(group_ids)
    group = Groups(ids, ~torch.isnan(rewards))
    centred, spread = group.centre(rewards)
    deviation = (group.sum(centred**2) / (group.count - 1).clamp(min=1)).sqrt()[group.index]
    values = centred if shift else rewards.double()
    # Equal rewards have no deviation to be measured in: dividing by eps would blow them up.
    values = values / torch.where(spread, deviation + eps, 1.0) if scale else values
    return torch.where(torch.isnan(rewards), torch.nan, values).to(rewards.dtype)


def whiten(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, eps: float | int = 1e-8
) -> Float[Tensor, "B T"]:
    """(value - mean) / sqrt(sample variance + eps) over all unmasked tokens of the batch; 0 where masked.

    Every token counts once, so long completions weigh more. Equal values give exact zeros.
    """
    kept = values[mask].double()
    out = torch.zeros_like(values)
    if kept.numel() > 1 and kept.max() > kept.min():
        out[mask] = ((kept - kept.mean()) / (kept.var() + eps).sqrt()).to(values.dtype)
    return out
