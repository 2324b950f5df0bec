"""The optimal token baseline: for each token of a prompt's samples a baseline of its own, the mean of their
rewards weighted by how much their gradients have gathered up to that token.

rewards 1 and 3                  first sample     second sample
score norms                      0.2  0.4         0.6  0.0  0.5
energy so far, W                 0.2  0.6         0.6  0.6  1.1
baseline, sum(r W) / sum(W)      2.5  2.0         2.5  2.0   -     one sample alone is left
advantage                       -1.5 -1.0         0.5  1.0  3.0
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.groups import Groups, is_scored
from grpo_dist.algorithms.process import sum_so_far


def optimal_token_baseline(
    rewards: Real[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    score_norms: Float[Tensor, "R T"],
    mask: Bool[Tensor, "R T"],
    *,
    sequence_ids: Int[Tensor, " R"] | None = None,
) -> Float[Tensor, "R T"]:
    """Token advantages r - sum(r W_t) / sum(W_t) over the samples of the group that have a t-th token.

    OTB (Li et al. 2026, arXiv:2602.07078): the baseline of least variance of a token's gradient, with the
    gradient's squared norm approximated by that of log pi by the logits, added up over the tokens so far.
    t counts sampled tokens, so a given token is no step of time: verl's ``tir_optimal_token_baseline``, and
    without given tokens its ``optimal_token_baseline``.

    Args:
        rewards: one per sample; one that is not finite leaves the sums and its sample gets 0.
        group_ids: samples of one prompt share an id.
        score_norms: 1 - 2 pi + sum of pi^2 over the vocabulary for each token, in [0, 2], under the weights
            before the update.
        mask: tokens that are trained.
        sequence_ids: the sample of each row, in order; None: each row is a sample.

    Returns:
        float64, 0 where masked. A token that one sample of its group alone has, the end of the longest, has
        no baseline: its advantage is r. 0 for a group with one scored sample. Where no weight has gathered
        yet the baseline is the group's mean.
    """
    known = is_scored(rewards)
    group = Groups(group_ids, known)
    centred, _ = group.centre(rewards)
    samples = torch.arange(len(mask), device=mask.device) if sequence_ids is None else sequence_ids
    counted = mask & known[samples][:, None]
    out = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    number = sum_so_far(mask.long(), sequence_ids)  # of a token in its sample, from 1
    cells = (group.index[samples][:, None] * (mask.numel() + 1) + number)[counted]
    _, cells = torch.unique(cells, return_inverse=True)  # the t-th tokens of a group share one
    owner = samples[:, None].expand_as(mask)[counted]
    energy = sum_so_far(torch.where(mask, score_norms.double(), 0.0), sequence_ids)[counted]

    def total(values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return torch.zeros_like(values).index_add(0, cells, values)[cells]

    weight = total(energy)
    # Centred rewards: equal ones give exact zeros.
    baseline = torch.where(weight == 0, 0.0, total(energy * centred[owner]) / weight)
    alone = total(torch.ones_like(energy)) < 2
    has_siblings = group.count[group.index[owner]] > 1
    out[counted] = torch.where(alone, rewards.double()[owner] * has_siblings, centred[owner] - baseline)
    return out
