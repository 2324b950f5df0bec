"""Advantages for what only the best samples of a group are worth, or for how rare a right answer is.

rewards          gpg, with another group of equal rewards     maxrl            grpo_passk, std none
[1, 0, 0, 0]     2 * [0.75, -0.25, -0.25, -0.25]              [3, -1, -1, -1]  [1, 0, 0, 0]
[1, 1, 0, 0]     2 * [0.5, 0.5, -0.5, -0.5]                   [1, 1, -1, -1]   [0, 0, 0, 0]
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.groups import Groups, deviation, is_scored, typed_like


def gpg(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """GPG: B / (B - M) * (r - mean of the group), M of the B scored samples being in groups of equal rewards.

    Chu et al. 2025 (arXiv:2504.02546), equation 9, with F_norm 1. Samples without a gradient would otherwise
    shrink the step's mean. verl's ``gpg`` divides by the samples whose *reward* is not 0; for rewards of 0
    and 1 these are the right ones.
    """
    group = Groups(group_ids, is_scored(rewards))
    centred, spread = group.centre(rewards)
    factor = group.count.sum() / spread.sum().clamp(min=1)
    return typed_like(centred * factor, rewards)


def maxrl(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """MaxRL: (r - mean of its group) / mean of its group; 0 in a group without a right answer.

    Tajwar et al. 2026 (arXiv:2602.02710), section 4: the gradient of the log-likelihood of a right answer,
    log p = -(sum over k of (1 - p)^k / k), of which the mean reward is the first order. The mean score of the
    right answers is unbiased for the first N orders of a group of N; less the mean of all scores, which is
    the baseline, for the first N - 1.

    Raises:
        ValueError: a finite reward is neither 0 nor 1; the derivation is that of right and wrong.
    """
    known = is_scored(rewards)
    odd = known & (rewards != 0) & (rewards != 1)
    if odd.any():
        raise ValueError(
            f"advantage maxrl: reward {float(rewards[odd][0]):g}: expected 0 or 1; use a single reward that "
            "grades right or wrong, with weight 1, or another algorithm.advantage"
        )
    group = Groups(group_ids, known)
    centred, spread = group.centre(rewards)
    mean = (group.sum(rewards) / group.count.clamp(min=1))[group.index]
    return typed_like(torch.where(spread, centred / torch.where(spread, mean, 1.0), 0.0), rewards)


def grpo_passk(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, std: str = "group", eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """(best - second best of the group) / (standard deviation + eps) for the best sample, 0 for all others.

    Tang et al. 2025 (arXiv:2503.19595); verl's ``grpo_passk``. It is the leave-one-out advantage of the best
    of all samples of the group: without any other sample the best stays the same. Two equal best samples have
    none. ``std``, ``eps``: as for `advantages.grpo`.

    Raises:
        ValueError: ``std`` is none of the four.
    """
    known = is_scored(rewards)
    group = Groups(group_ids, known)
    centred, spread = group.centre(rewards)
    low = torch.full((len(group.count),), -torch.inf, dtype=torch.float64, device=rewards.device)
    values = torch.where(known, rewards.double(), -torch.inf)
    best = low.scatter_reduce(0, group.index, values, "amax")[group.index]
    is_best = spread & (values == best)
    alone = is_best & (group.sum(is_best.double()) == 1)[group.index]
    others = torch.where(is_best, -torch.inf, values)
    second = low.scatter_reduce(0, group.index, others, "amax")[group.index]
    scale = deviation(std, centred, rewards, group, eps)
    return typed_like(torch.where(alone, (best - second) / scale, 0.0), rewards)
