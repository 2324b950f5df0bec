"""Advantages that train pass@k: what a sample adds to the best of k.

Of one group, every subset of k samples is a "try" whose reward is the best of its members. A sample's
advantage is the mean reward of the tries it is in, less the mean over all tries, over their deviation:

    rewards [1, 0, 0, 0], k = 2   tries with the right one have 1: 3 of 6
                                  right: (1 - 1/2) / (1/2) = 1, wrong: (1/3 - 1/2) / (1/2) = -1/3

Chen et al. 2025, "Pass@k training" (arXiv:2508.10751), section 2.4, in closed form for any rewards, not only
right and wrong: order statistics replace the sampling of subsets.
"""

from __future__ import annotations

from math import comb, sqrt

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.groups import is_scored, typed_like


def pass_at_k(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, k: int, eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """Advantage of each sample for the best of ``k``. With ``k`` 1 it is GRPO with the population deviation.

    Samples that could not be scored (not finite) leave the group and get 0, and so does a group of fewer than
    ``k`` + 1 scored samples, all of whose tries are the same, or of equal rewards.

    Raises:
        ValueError: ``k`` is below 1.
    """
    if k < 1:
        raise ValueError(f"pass_at_k: k = {k}: expected at least 1")
    out = torch.zeros_like(rewards, dtype=torch.float64)
    scored = is_scored(rewards)
    for group in torch.unique(group_ids).tolist():
        rows = ((group_ids == group) & scored).nonzero()[:, 0]
        values = sorted(rewards[rows].double().tolist())
        if len(values) > k and values[k - 1] < values[-1]:  # else the worst try is as good as the best
            own = rewards[rows].double().tolist()
            out[rows] = torch.tensor(_advantages(own, k, eps), dtype=out.dtype, device=rewards.device)
    return typed_like(out, rewards)


def _advantages(values: list[float], k: int, eps: float) -> list[float]:
    ordered = sorted(values)
    mean, square = _best_of(ordered, k), _best_of(ordered, k, power=2)
    scale = sqrt(max(square - mean * mean, 0.0)) + eps
    return [(_best_with(value, ordered, k) - mean) / scale for value in values]


def _best_of(ordered: list[float], k: int, power: int = 1) -> float:
    """Return the mean over all k-subsets of the ``power`` of their best member; ``ordered`` is ascending."""
    tries = comb(len(ordered), k)
    return sum(value**power * comb(i, k - 1) for i, value in enumerate(ordered)) / tries


def _best_with(value: float, ordered: list[float], k: int) -> float:
    """Return the mean of the best over all k-subsets that contain ``value``, one of ``ordered``."""
    if k == 1:
        return value
    others = list(ordered)
    others.remove(value)
    tries = comb(len(others), k - 1)
    return sum(max(value, other) * comb(i, k - 2) for i, other in enumerate(others)) / tries
