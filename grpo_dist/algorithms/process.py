"""Process supervision: a reward for every step of a solution instead of one for its answer.

step rewards [0.2, 0.8], ends [3, 7]; normalised over all steps of the group [-1, 1]
token        0 1 2 3   4 5 6 7   8
advantage    0 0 0 0   1 1 1 1   0       the sum over the steps that end at or after the token
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.advantages import grpo
from grpo_dist.algorithms.groups import typed_like


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

    Args:
        step_rewards: of all steps of all rows, in any order. One that is not finite could not be scored: it
            leaves the statistics and adds nothing.
        step_rows: the row, 0..B-1, that each step belongs to.
        step_ends: index in [0, T) of each step's last token.
        group_ids: rows of one prompt share an id. Steps are normalised over all steps of their group.
        mask: tokens that are trained.
        sequence_ids: as for `sum_to_go`.
        std, eps: as for `advantages.grpo`.

    Returns:
        Advantages, 0 where masked and behind the last step of a row.
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
        for row in _continued(sequence_ids):
            out[row] += out[row + 1, 0]
    return out


def sum_so_far(
    values: Real[Tensor, "B T"], sequence_ids: Int[Tensor, " B"] | None = None
) -> Real[Tensor, "B T"]:
    """Sum each token's value and all earlier ones: [1, 2, 4] -> [1, 3, 7]; ``sequence_ids`` as above."""
    out = values.cumsum(1)
    if sequence_ids is not None:
        for row in reversed(_continued(sequence_ids)):
            out[row + 1] += out[row, -1]
    return out


def discounted_to_go(
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    discount: float | int,
    sequence_ids: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return each token's value plus ``discount`` times the return of the next unmasked token, float64.

    [1, 2, 4] with discount 0.5 -> [3, 4, 4]. A masked token, one that an environment put in, is no step of
    time: it has the return of the next unmasked token. ``sequence_ids``: as for `sum_to_go`.
    """
    kept = torch.where(mask, values, 0.0).double()
    out, running = torch.empty_like(kept), torch.zeros(len(kept), dtype=torch.float64, device=kept.device)
    for t in range(kept.shape[1] - 1, -1, -1):
        running = torch.where(mask[:, t], kept[:, t] + discount * running, running)
        out[:, t] = running
    if sequence_ids is not None:
        steps = mask.flip(1).cumsum(1).flip(1)  # from a token to the first one of the next row
        for row in _continued(sequence_ids):
            out[row] += out[row + 1, 0] * float(discount) ** steps[row]
    return out


def _continued(sequence_ids: Int[Tensor, " B"]) -> list[int]:
    """Return the rows whose sequence continues in the next row, the last one first."""
    rows: list[int] = (sequence_ids[1:] == sequence_ids[:-1]).nonzero()[:, 0].flip(0).tolist()
    return rows
