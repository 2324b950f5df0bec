"""Advantages of tokens and turns: from the steps of a solution (`process`), from the turns of an episode
(`turn_level`), and with a baseline per token (`optimal_token_baseline`); and the sums over later or earlier
tokens that they use.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.advantages import grpo
from grpo_dist.algorithms.normalise import Groups, is_scored, typed_like


def process(
    step_rewards: Real[Tensor, " N"],
    step_rows: Int[Tensor, " N"],
    step_ends: Int[Tensor, " N"],
    group_ids: Int[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    sequence_ids: Int[Tensor, " B"] | None = None,
    std: str = "group",
    eps: float | int = 1e-6,
) -> Float[Tensor, "B T"]:
    """Token advantages from step rewards; DeepSeekMath (Shao et al. 2024, arXiv:2402.03300), section 4.1.3.

        step rewards [0.2, 0.8], ends [3, 7]; normalised over all steps of the group [-1, 1]
        token        0 1 2 3   4 5 6 7   8
        advantage    0 0 0 0   1 1 1 1   0       the sum over the steps that end at or after the token

    Args:
        step_rewards: rewards of all steps of all rows, in any order. A non-finite one is unscored: it leaves
            the statistics and adds nothing.
        step_rows: the row, 0..B-1, that each step belongs to.
        step_ends: index in [0, T) of each step's last token.
        group_ids: rows of one prompt share an id. Steps are normalised over all steps of their group.
        mask: tokens that are trained.
        sequence_ids: as for `sum_to_go`.
        std, eps: as for `advantages.grpo`.

    Returns:
        Advantages, 0 where masked and after the last step of a row.
    """
    normalised = grpo(step_rewards.double(), group_ids[step_rows], std=std, eps=eps)
    at_ends = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    at_ends.index_put_((step_rows, step_ends), normalised, accumulate=True)
    return typed_like(torch.where(mask, sum_to_go(at_ends, sequence_ids), 0.0), step_rewards)


def sum_to_go(
    values: Float[Tensor, "B T"], sequence_ids: Int[Tensor, " B"] | None = None
) -> Float[Tensor, "B T"]:
    """Sum each token's value and all later ones: [1, 2, 4] -> [7, 6, 4].

    ``sequence_ids``: neighbouring rows with one id are parts of one sequence, in order; None: each row is a
    sequence.
    """
    out = values.flip(1).cumsum(1).flip(1)
    if sequence_ids is not None:
        for row in _continued_rows(sequence_ids):
            out[row] += out[row + 1, 0]
    return out


def sum_so_far(
    values: Real[Tensor, "B T"], sequence_ids: Int[Tensor, " B"] | None = None
) -> Real[Tensor, "B T"]:
    """Sum each token's value and all earlier ones: [1, 2, 4] -> [1, 3, 7]; ``sequence_ids`` as above."""
    out = values.cumsum(1)
    if sequence_ids is not None:
        for row in reversed(_continued_rows(sequence_ids)):
            out[row + 1] += out[row, -1]
    return out


def discounted_to_go(
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    discount: float | int,
    sequence_ids: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return each token's value plus ``discount`` times the return of the next unmasked token, float64.

    [1, 2, 4] with discount 0.5 -> [3, 4, 4]. A masked token, inserted by an environment, is no time step: it
    has the return of the next unmasked token. ``sequence_ids``: as for `sum_to_go`.
    """
    terms = torch.where(mask, values, 0.0).double()
    out, running = torch.empty_like(terms), torch.zeros(len(terms), dtype=torch.float64, device=terms.device)
    for t in range(terms.shape[1] - 1, -1, -1):
        running = torch.where(mask[:, t], terms[:, t] + discount * running, running)
        out[:, t] = running
    if sequence_ids is not None:
        steps = mask.flip(1).cumsum(1).flip(1)  # from a token to the first one of the next row
        for row in _continued_rows(sequence_ids):
            out[row] += out[row + 1, 0] * float(discount) ** steps[row]
    return out


def _continued_rows(sequence_ids: Int[Tensor, " B"]) -> list[int]:
    """Return the rows whose sequence continues in the next row, the last one first."""
    rows: list[int] = (sequence_ids[1:] == sequence_ids[:-1]).nonzero()[:, 0].flip(0).tolist()
    return rows


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
    """Return advantages of turns: each turn's return against the returns of the same turn in its group.

        episode of a prompt   rewards of turns   reward   returns   minus turn's mean       / its deviation
        a                     0, 0               1        [1, 1]    [ 1/3,  1/2]            [ 0.58,  0.71]
        b                     0, 0               0        [0, 0]    [-2/3, -1/2]            [-1.15, -0.71]
        c                     0                  1        [1]       [ 1/3]                  [ 0.58]

    The return of turn t is r_t + discount * (return of turn t + 1), the return of the last turn r_t + R, with
    R the reward of the episode. A = `advantages.grpo` over the returns of turn t of all episodes of the
    prompt that have a turn t.

    It is the step-level part of GiGPO (Feng et al. 2025, arXiv:2505.10978): discounted step returns
    normalised within a group, with steps matched by turn number instead of equal environment states. MT-GRPO
    (Zeng et al. 2025, arXiv:2505.11821) also has turn and outcome rewards, but normalises them separately.

    Args:
        turn_rewards: rewards of all turns, sample after sample, turn after turn; 0 for a turn without one.
        turn_samples: the sample, 0..B-1, that each turn belongs to.
        rewards: R of each sample.
        group_ids: samples of one prompt share an id.
        discount: in [0, 1], for each later turn.
        std, eps: as for `advantages.grpo`.

    Returns:
        float64. 0 for a turn that only one scored episode of its group has. A turn with a non-finite return
        (from its own, a later or the episode's reward) leaves the statistics and gets 0.
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


def optimal_token_baseline(
    rewards: Real[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    score_norms: Float[Tensor, "R T"],
    mask: Bool[Tensor, "R T"],
    *,
    sequence_ids: Int[Tensor, " R"] | None = None,
) -> Float[Tensor, "R T"]:
    """Token advantages r - sum(r W_t) / sum(W_t) over the samples of the group that have a t-th token.

        rewards 1 and 3                  first sample     second sample
        score norms                      0.2  0.4         0.6  0.0  0.5
        energy so far, W                 0.2  0.6         0.6  0.6  1.1
        baseline, sum(r W) / sum(W)      2.5  2.0         2.5  2.0   -     one sample alone is left
        advantage                       -1.5 -1.0         0.5  1.0  3.0

    OTB (Li et al. 2026, arXiv:2602.07078): the baseline of least variance of a token's gradient, with the
    gradient's squared norm approximated by the squared norm of the gradient of log pi by the logits, summed
    over the tokens so far. t counts sampled tokens, so a given token is no time step: verl's
    ``tir_optimal_token_baseline``, and without given tokens its ``optimal_token_baseline``.

    Args:
        rewards: one per sample; a non-finite one leaves the sums, and its sample gets 0.
        group_ids: samples of one prompt share an id.
        score_norms: 1 - 2 pi + sum of pi^2 over the vocabulary for each token, in [0, 2], under the weights
            before the update.
        mask: tokens that are trained.
        sequence_ids: the sample of each row, in order; None: each row is a sample.

    Returns:
        float64, 0 where masked. A token that only one sample of its group has, the end of the longest, has no
        baseline: its advantage is r. 0 for a group with one scored sample. Where W_t is still 0 the baseline
        is the group's mean.
    """
    scored = is_scored(rewards)
    group = Groups(group_ids, scored)
    centred, _ = group.centre(rewards)
    samples = torch.arange(len(mask), device=mask.device) if sequence_ids is None else sequence_ids
    counted = mask & scored[samples][:, None]
    out = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    number = sum_so_far(mask.long(), sequence_ids)  # each token's number in its sample, from 1
    cells = (group.index[samples][:, None] * (mask.numel() + 1) + number)[counted]
    _, cells = torch.unique(cells, return_inverse=True)  # the t-th tokens of a group share a cell
    owner = samples[:, None].expand_as(mask)[counted]
    energy = sum_so_far(torch.where(mask, score_norms.double(), 0.0), sequence_ids)[counted]

    def total(values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return torch.zeros_like(values).index_add(0, cells, values)[cells]

    weight = total(energy)
    # Centred, so that equal rewards give exact zeros.
    baseline = torch.where(weight == 0, 0.0, total(energy * centred[owner]) / weight)
    alone = total(torch.ones_like(energy)) < 2
    has_siblings = group.count[group.index[owner]] > 1
    out[counted] = torch.where(alone, rewards.double()[owner] * has_siblings, centred[owner] - baseline)
    return out
