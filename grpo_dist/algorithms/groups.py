"""Sums and means over the samples of each prompt."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor


def is_scored(rewards: Real[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """True for finite rewards. NaN and infinity both mean "could not be scored"."""
    return torch.isfinite(rewards)


def typed_like(values: Float[Tensor, "*shape"], rewards: Real[Tensor, ...]) -> Float[Tensor, "*shape"]:
    """Convert ``values`` to the dtype of ``rewards``, or to float32 if that is an integer dtype."""
    return values.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


class Groups:
    """Sums over groups of the samples that are ``known``. ``index`` [B]: the group of each sample; ``count``
    [groups].
    """

    def __init__(self, group_ids: Int[Tensor, " B"], known: Bool[Tensor, " B"]) -> None:
        unique, self.index = torch.unique(group_ids, return_inverse=True)
        self._known, self._size = known, len(unique)
        self.count = self.sum(torch.ones_like(known, dtype=torch.float64))

    def sum(self, values: Real[Tensor, " B"]) -> Float[Tensor, " G"]:
        zeros = torch.zeros(self._size, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.index, torch.where(self._known, values.double(), 0.0))

    def centre(self, values: Real[Tensor, " B"]) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
        """Known values less the mean of their group, in float64; and where the group has a spread at all:
        elsewhere the values are exactly 0, free of the rounding of the mean.
        """
        known = torch.where(self._known, values.double(), 0.0)
        mean = self.sum(known) / self.count.clamp(min=1)
        low = torch.full_like(mean, torch.inf).scatter_reduce(
            0, self.index, torch.where(self._known, known, torch.inf), "amin"
        )
        high = torch.full_like(mean, -torch.inf).scatter_reduce(
            0, self.index, torch.where(self._known, known, -torch.inf), "amax"
        )
        spread = (high > low)[self.index] & self._known
        return torch.where(spread, known - mean[self.index], 0.0), spread


def deviation(
    std: str,
    centred: Float[Tensor, " B"],
    rewards: Real[Tensor, " B"],
    group: Groups,
    eps: float | int,
) -> Float[Tensor, "*b"]:
    """Return what ``std`` of `advantages.grpo` divides by, float64: of each sample, or one number.

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
        known = is_scored(rewards)
        everyone, _ = Groups(torch.zeros_like(rewards, dtype=torch.long), known).centre(rewards)
        return ((everyone**2).sum() / (known.sum() - 1).clamp(min=1)).sqrt() + eps
    raise ValueError(f"std = {std!r}: expected group, batch or none, or batch_raw")
