"""Means over runs of neighbouring trained tokens: of an episode, the actions between two observations.

mask      . x x . x x x .
values      1 3   2 4 6
mean        2 2   4 4 4
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def segment_mean(values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return for each unmasked token the mean of its run of neighbouring unmasked tokens; 0 where masked."""
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    width = mask.shape[1] + 1  # one more than the most runs of a row: 0 is in front of the first
    rows = torch.arange(len(mask), device=mask.device)[:, None]
    index = (rows * width + begins.long().cumsum(dim=1))[mask]
    sums, counts = torch.zeros(2, len(mask) * width, dtype=values.dtype, device=values.device)
    sums.index_add_(0, index, values[mask])
    counts.index_add_(0, index, torch.ones_like(values[mask]))
    out = torch.zeros_like(values)
    out[mask] = sums[index] / counts[index]
    return out
