"""Turn-level credit: an advantage for every action of an episode instead of one for the whole of it.

episode of a prompt   rewards of turns   reward   returns   less each turn's mean   / its deviation
a                     0, 0               1        [1, 1]    [ 1/3,  1/2]            [ 0.58,  0.71]
b                     0, 0               0        [0, 0]    [-2/3, -1/2]            [-1.15, -0.71]
c                     0                  1        [1]       [ 1/3]                  [ 0.58]
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.advantages import grpo


def turn_level(
    turn_rewards: Real[Tensor, " N"],
    turn_samples: Int[Tensor, " N"],
    rewards: Real[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    discount: float | int = 1.0,
    std: str = "group",
    eps: float | int = 1e-6,
) -> Float[Tensor, " N"]:
    """Advantages of turns: the return of each turn against those of the same turn in its group.

    The return of turn t is r_t + discount * (return of turn t + 1), that of the last turn r_t + R, with R the
    reward of the episode. A = `advantages.grpo` over the returns of turn t of all episodes of the prompt that
    have a turn t.

    It is the step-level part of GiGPO (Feng et al. 2025, arXiv:2505.10978), discounted returns of a step
    normalised within a group, where the step is the number of the turn and not an equal state of the
    environment. Rewards of turns and of the outcome: MT-GRPO (Zeng et al. 2025, arXiv:2505.11821),
    which normalises the two apart.

    Args:
        turn_rewards: of all turns, sample after sample, turn after turn; 0 where a turn has none.
        turn_samples: the sample, 0..B-1, that each turn belongs to.
        rewards: R of each sample.
        group_ids: samples of one prompt share an id.
        discount: in [0, 1], for each later turn.
        std, eps: as for `advantages.grpo`.

    Returns:
        float64. 0 for a turn that one scored episode of its group alone has. A turn whose return is not
        finite, because its own, a later or the episode's reward is not, leaves the statistics and gets 0.
    """
    samples = turn_samples.tolist()
    returns, numbers = turn_rewards.double().tolist(), [0] * len(samples)
    for i in range(1, len(samples)):
        numbers[i] = numbers[i - 1] + 1 if samples[i] == samples[i - 1] else 0
    outcomes = rewards.double().tolist()
    for i in reversed(range(len(samples))):
        is_last = i + 1 == len(samples) or samples[i + 1] != samples[i]
        returns[i] += outcomes[samples[i]] if is_last else discount * returns[i + 1]
    ids = group_ids[turn_samples] * (max(numbers, default=0) + 1) + torch.tensor(numbers, dtype=torch.long)
    return grpo(torch.tensor(returns, dtype=torch.float64), ids, std=std, eps=eps)
