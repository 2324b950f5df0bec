"""Normalisation by statistics over a step's samples: rewards before an estimator, advantages after it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.moments import Moments

OVER = ("none", "group", "batch", "running")


def is_scored(rewards: Real[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Return True for finite rewards. NaN and infinity both mean "unscored"."""
    return torch.isfinite(rewards)


def typed_like(values: Float[Tensor, "*shape"], rewards: Real[Tensor, ...]) -> Float[Tensor, "*shape"]:
    """Convert ``values`` to the dtype of ``rewards``, or to float32 if that is an integer dtype."""
    return values.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


class Groups:
    """Sums over each group's ``scored`` samples. ``index`` [B]: each sample's group; ``count`` [groups]."""

    def __init__(self, group_ids: Int[Tensor, " B"], scored: Bool[Tensor, " B"]) -> None:
        unique, self.index = torch.unique(group_ids, return_inverse=True)
        self._scored, self._size = scored, len(unique)
        self.count = self.sum(torch.ones_like(scored, dtype=torch.float64))

    def sum(self, values: Real[Tensor, " B"]) -> Float[Tensor, " G"]:
        zeros = torch.zeros(self._size, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.index, torch.where(self._scored, values.double(), 0.0))

    def centre(self, values: Real[Tensor, " B"]) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
        """Return scored values minus their group's mean, float64, and where the group has a spread. Without a
        spread the values are exactly 0, free of the mean's rounding error.
        """
        scored_values = torch.where(self._scored, values.double(), 0.0)
        mean = self.sum(scored_values) / self.count.clamp(min=1)
        low = torch.full_like(mean, torch.inf).scatter_reduce(
            0, self.index, torch.where(self._scored, scored_values, torch.inf), "amin"
        )
        high = torch.full_like(mean, -torch.inf).scatter_reduce(
            0, self.index, torch.where(self._scored, scored_values, -torch.inf), "amax"
        )
        spread = (high > low)[self.index] & self._scored
        return torch.where(spread, scored_values - mean[self.index], 0.0), spread


def deviation(
    std: str,
    centred: Float[Tensor, " B"],
    rewards: Real[Tensor, " B"],
    group: Groups,
    eps: float | int,
) -> Float[Tensor, "*b"]:
    """Return the divisor for ``std`` of `advantages.grpo`, float64: per sample, or one number.

    Args:
        centred: as `Groups.centre` returns them.
        eps: added to the deviation.

    Raises:
        ValueError: ``std`` is none of group, batch, batch_raw and none.
    """
    if std == "none":
        return torch.ones_like(centred)
    if std == "group":
        return (group.sum(centred**2) / (group.count - 1).clamp(min=1)).sqrt()[group.index] + eps
    if std == "batch":
        return ((centred**2).sum() / (group.count.sum() - 1).clamp(min=1)).sqrt() + eps
    if std == "batch_raw":
        scored = is_scored(rewards)
        centred_rewards, _ = Groups(torch.zeros_like(rewards, dtype=torch.long), scored).centre(rewards)
        return ((centred_rewards**2).sum() / (scored.sum() - 1).clamp(min=1)).sqrt() + eps
    raise ValueError(f"std = {std!r}: expected group, batch or none, or batch_raw")


def normalise_rewards(
    rewards: Real[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    over: str,
    shift: bool = True,
    scale: bool = True,
    eps: float | int = 1e-6,
    moments: Moments | None = None,
) -> Real[Tensor, " B"]:
    """Return (r - mean) / (sample deviation + eps) over the group, the batch, or all steps so far.

    ``shift`` False leaves the mean in, ``scale`` False the deviation; ``over`` none returns ``rewards``
    unchanged. A non-finite reward becomes NaN and leaves the statistics. Fewer than two scored samples have
    deviation 0.

    Args:
        moments: for ``over`` running: moments of all rewards so far, including this batch.

    Returns:
        float64: estimators centre the values again, and float32 keeps too few digits of differences if the
        mean is left in.

    Raises:
        ValueError: ``over`` is none of the four.
    """
    if over not in OVER:
        raise ValueError(f"reward_norm = {over!r}: expected {', '.join(OVER)}")
    if over == "none":
        return rewards
    scored = is_scored(rewards)
    if over == "running":
        assert moments is not None, "running statistics come from the steps so far"
        mean, deviation, spread = moments.mean, moments.deviation, moments.deviation > 0
        centred = torch.where(scored, rewards.double() - mean, 0.0)
        divisor = torch.full_like(centred, deviation + eps if spread else 1.0)
    else:
        group = Groups(group_ids if over == "group" else torch.zeros_like(group_ids), scored)
        centred, differ = group.centre(rewards)
        deviations = (group.sum(centred**2) / (group.count - 1).clamp(min=1)).sqrt()[group.index]
        # Equal rewards have deviation 0: dividing by eps would blow them up.
        divisor = torch.where(differ, deviations + eps, 1.0)
    values = centred if shift else rewards.double()
    return torch.where(scored, values / divisor if scale else values, torch.nan)


def whiten(
    values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], *, eps: float | int = 1e-8
) -> Float[Tensor, "B T"]:
    """Return (value - mean) / sqrt(sample variance + eps) over all unmasked tokens; 0 where masked.

    Every token counts once, so long completions weigh more. Equal values give exact zeros. A non-finite value
    is left out of the statistics and becomes 0.
    """
    counted = mask & torch.isfinite(values)
    finite = values[counted].double()
    out = torch.zeros_like(values)
    if finite.numel() > 1 and finite.max() > finite.min():
        out[counted] = ((finite - finite.mean()) / (finite.var() + eps).sqrt()).to(values.dtype)
    return out


def length_weights(
    mask: Bool[Tensor, "B T"], sequence_ids: Int[Tensor, " B"] | None = None
) -> Float[Tensor, "B 1"]:
    """Return a weight for the advantages of each row by the length of its sequence, float64: 1.5 for the
    shortest down to 0.5 for the longest, linear in the length, divided by their mean over all sequences.

    Lengths 2, 4, 6 -> 1.5, 1, 0.5. ROLL's ``length_loss_weight``, which uses the lengths of a micro-batch;
    here the step's lengths count, so that no split changes a weight. Equal lengths have weight 1.

    Args:
        mask: tokens that count. A sequence without any leaves the statistics and has weight 1.
        sequence_ids: rows with one id are parts of one sequence, ids from 0 up; None: each row is a sequence.
    """
    rows = mask.sum(dim=1)
    ids = torch.arange(len(mask), device=mask.device) if sequence_ids is None else sequence_ids
    lengths = torch.zeros(int(ids.max()) + 1 if len(ids) else 0, dtype=rows.dtype, device=rows.device)
    lengths.index_add_(0, ids, rows)
    nonempty = lengths > 0
    weights = torch.ones_like(lengths, dtype=torch.float64)
    if nonempty.any():
        sizes = lengths[nonempty].double()
        raw = 1.5 - (sizes - sizes.min()) / (sizes.max() - sizes.min()).clamp(min=1)
        weights[nonempty] = raw / raw.mean()
    return weights[ids][:, None]
