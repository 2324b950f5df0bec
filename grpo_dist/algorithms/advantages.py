"""Advantages: from the rewards of a step to one number per sample.

    rewards [0, 0, 1, 1], one group, std "none" -> [-0.5, -0.5, 0.5, 0.5]

    rewards          gpg, with another group of equal rewards     maxrl            grpo_passk, std none
    [1, 0, 0, 0]     2 * [0.75, -0.25, -0.25, -0.25]              [3, -1, -1, -1]  [1, 0, 0, 0]
    [1, 1, 0, 0]     2 * [0.5, 0.5, -0.5, -0.5]                   [1, 1, -1, -1]   [0, 0, 0, 0]

``group_ids`` groups the samples of one prompt; ids need be neither sorted nor consecutive.
Statistics are taken in float64 and the result has the type of ``rewards``, float32 for integer rewards. So a
group of equal rewards gets exact zeros: in float32 the mean of eight 0.7s is not 0.7, and dividing that
rounding error by a deviation of the same size gives 0.06 to 0.9.

A NaN or infinite reward means unscored: under every estimator the sample leaves the statistics and gets
advantage 0.

Traits of an estimator that checks and the loop need, e.g. that it needs a group, are in `config.algorithm`,
which imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import comb, sqrt

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.normalise import Groups, deviation, is_scored, typed_like


def grpo(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, std: str = "group", eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """Group-relative advantage: (r - mean of its group) / (standard deviation + eps).

    DeepSeekMath (Shao et al. 2024, arXiv:2402.03300), section 4.1.2.

    Args:
        rewards: one per sample; a non-finite one leaves the statistics and gets advantage 0.
        group_ids: samples of one prompt share an id.
        std: ``group``: sample deviation (ddof 1) of the group. ``batch``: sample deviation of the centred
            rewards of all scored samples of the batch, whose mean is 0 (REINFORCE++ with a group baseline,
            Hu et al. 2025, arXiv:2501.03262). ``batch_raw``: sample deviation of the rewards themselves over
            the batch, which is TRL's ``scale_rewards: batch`` and ROLL's ``norm_std_type: batch`` (Lite PPO,
            Liu et al. 2025, arXiv:2508.08221). It is never smaller: it also counts how prompts differ in
            difficulty. ``none``: no division.
        eps: added to the deviation.

    Returns:
        Advantages. 0 for a group with one scored sample or with equal rewards. For
        [1, 0, 0, 1, 0, 0, 0, 0]: 1.6201816 for a right answer, -0.5400605 for a wrong one.

    Raises:
        ValueError: ``std`` is none of the four.
    """
    group = Groups(group_ids, is_scored(rewards))
    centred, spread = group.centre(rewards)
    scale = deviation(std, centred, rewards, group, eps)
    return typed_like(torch.where(spread, centred / scale, 0.0), rewards)


def dr_grpo(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Dr. GRPO: r - mean of its group, with no division, which would weight easy and hard prompts up.

    Liu et al. 2025 (arXiv:2503.20783), section 3.2. For [1, 0, 0, 1, 0, 0, 0, 0]: 0.75 and -0.25.
    """
    return grpo(rewards, group_ids, std="none")


def rloo(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Leave-one-out: r - mean of the other samples of its group = n / (n - 1) * (r - mean of the group).

    Ahmadian et al. 2024 (arXiv:2402.14740), equation 6. For [1, 0, 0, 1, 0, 0, 0, 0]: 0.8571429 and
    -0.2857143.
    """
    group = Groups(group_ids, is_scored(rewards))
    centred, spread = group.centre(rewards)
    factor = group.count / (group.count - 1).clamp(min=1)
    return typed_like(torch.where(spread, centred * factor[group.index], 0.0), rewards)


def rloo_normalized(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """Leave-one-out mean and deviation: (r - mean of the others) / (sample deviation of the others + eps).

    NeMo-RL's GRPO with ``use_leave_one_out_baseline`` and ``normalize_rewards``, its default. Where the
    others are equal there is no division. For [1, 0, 0, 1, 0, 0, 0, 0]: 2.2677808 for a right answer,
    -0.5855388 for a wrong one; for [1, 0, 0, 0]: 1 and -0.5773493.
    """
    group = Groups(group_ids, is_scored(rewards))
    centred, spread = group.centre(rewards)
    count, squares = group.count[group.index], group.sum(centred**2)[group.index]
    factor = count / (count - 1).clamp(min=1)
    others = squares - factor * centred**2  # sum of their squared differences from their mean
    variance = torch.where(others > 1e-12 * squares, others, 0.0) / (count - 2).clamp(min=1)
    scale = torch.where(variance > 0, variance.sqrt() + eps, 1.0)
    return typed_like(torch.where(spread, factor * centred / scale, 0.0), rewards)


def reinforce_pp(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """REINFORCE++: the reward itself; whitening over all tokens of the batch is the baseline.

    Hu et al. 2025 (arXiv:2501.03262), section 3. `algorithm.advantage.whiten` is on with it unless the
    configuration says otherwise.
    """
    return typed_like(_zero_nonfinite(rewards.double()), rewards)


def flash_reinforce(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """FlashREINFORCE: r - mean of all rewards of the step, for one sample a prompt.

    Hu et al. 2026 ("FlashREINFORCE: Critic-Free, Single-Rollout, Asynchronous RL for Agentic Language
    Models"), and the estimator of this name in OpenRLHF, TRL, verl and slime. Groups are ignored. For
    [1, 0, 0, 1, 0, 0, 0, 0]: 0.75 and -0.25.
    """
    return grpo(rewards, torch.zeros_like(group_ids), std="none")


def reinforce_pp_baseline(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """REINFORCE++ with a group baseline: r - mean of its group, whitened over all tokens of the batch.

    Hu et al. 2025 (arXiv:2501.03262). For [1, 0, 0, 1, 0, 0, 0, 0] with lengths [5, 3, 1, 4, 2, 5, 2, 3]
    whitening gives 1.3063945 for a right answer and -0.7348470 for a wrong one.
    """
    return grpo(rewards, group_ids, std="none")


def remax(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, baselines: Real[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """ReMax: r - reward of the greedy answer to the same prompt; Li et al. 2023 (arXiv:2310.10505).

    ``baselines``: the greedy reward, one per sample. A sample gets 0 if its reward or baseline is not finite.
    """
    return typed_like(_zero_nonfinite(rewards.double() - baselines.double()), rewards)


def opo(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, lengths: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """OPO: r - mean of the group weighted by length, the baseline of least variance when gradients of tokens
    are independent; Hao et al. 2025 (arXiv:2505.23585), equation 6.

    ``lengths``: completion tokens of each sample. For [1, 0, 0, 1, 0, 0, 0, 0] with lengths
    [5, 3, 1, 4, 2, 5, 2, 3]: 0.64 and -0.36.
    """
    group = Groups(group_ids, is_scored(rewards))
    _, spread = group.centre(rewards)
    tokens = group.sum(lengths.double())
    baseline = group.sum(_zero_nonfinite(rewards.double()) * lengths) / tokens.clamp(min=1)
    return typed_like(torch.where(spread, rewards.double() - baseline[group.index], 0.0), rewards)


def gdpo(
    rewards: Real[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    parts: Real[Tensor, "K B"],
    weights: Real[Tensor, " K"],
    std: str = "group",
    eps: float | int = 1e-6,
) -> Float[Tensor, " B"]:
    """GDPO: each reward normalised separately in its group, their weighted sum normalised over the batch.

    Liu et al. 2026 (arXiv:2601.05242). Normalising the summed reward loses which rewards a sample earned:
    (right, bad format) and (wrong, good format) would get the same advantage.

    Args:
        rewards: the weighted sum; only its NaNs are used: a NaN sample gets 0 and leaves all statistics.
        parts: each reward before weighting.
    """
    scored = is_scored(rewards)
    scored_parts = torch.where(scored, parts, torch.nan)
    total = sum(
        weight * grpo(part.double(), group_ids, std=std, eps=eps)
        for weight, part in zip(weights.tolist(), scored_parts, strict=True)
    )
    assert isinstance(total, Tensor)
    # Centred per group, the sums already have mean 0 over the batch: only their scale is normalised.
    scale = (total.square().sum() / max(int(scored.sum()) - 1, 1)).sqrt() + eps
    return typed_like(torch.where(scored, total / scale, 0.0), rewards)


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
        ValueError: a finite reward is neither 0 nor 1; the derivation assumes right or wrong.
    """
    scored = is_scored(rewards)
    odd = scored & (rewards != 0) & (rewards != 1)
    if odd.any():
        raise ValueError(
            f"advantage maxrl: reward {float(rewards[odd][0]):g}: expected 0 or 1; use a single reward that "
            "grades right or wrong, with weight 1, or another algorithm.advantage"
        )
    group = Groups(group_ids, scored)
    centred, spread = group.centre(rewards)
    mean = (group.sum(rewards) / group.count.clamp(min=1))[group.index]
    return typed_like(torch.where(spread, centred / torch.where(spread, mean, 1.0), 0.0), rewards)


def grpo_passk(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, std: str = "group", eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """(best - second best of the group) / (standard deviation + eps) for the best sample, 0 for all others.

    Tang et al. 2025 (arXiv:2503.19595); verl's ``grpo_passk``. It is the leave-one-out advantage of the best
    of all samples of the group: without any other sample the best stays the same. Two equal best samples get
    0. ``std``, ``eps``: as for `grpo`.

    Raises:
        ValueError: ``std`` is none of the four.
    """
    scored = is_scored(rewards)
    group = Groups(group_ids, scored)
    centred, spread = group.centre(rewards)
    low = torch.full((len(group.count),), -torch.inf, dtype=torch.float64, device=rewards.device)
    values = torch.where(scored, rewards.double(), -torch.inf)
    best = low.scatter_reduce(0, group.index, values, "amax")[group.index]
    is_best = spread & (values == best)
    alone = is_best & (group.sum(is_best.double()) == 1)[group.index]
    others = torch.where(is_best, -torch.inf, values)
    second = low.scatter_reduce(0, group.index, others, "amax")[group.index]
    scale = deviation(std, centred, rewards, group, eps)
    return typed_like(torch.where(alone, (best - second) / scale, 0.0), rewards)


def pass_at_k(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, k: int, eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """Advantage of each sample for the best of ``k``. With ``k`` 1 it is GRPO with the population deviation.

    In a group every subset of k samples is a "try" whose reward is the best of its members. A sample's
    advantage is (mean reward of the tries with the sample - mean over all tries) / deviation of the tries:

        rewards [1, 0, 0, 0], k = 2   tries with the right one have 1: 3 of 6
                                      right: (1 - 1/2) / (1/2) = 1, wrong: (1/3 - 1/2) / (1/2) = -1/3

    Chen et al. 2025, "Pass@k training" (arXiv:2508.10751), section 2.4, in closed form for any rewards, not
    only right and wrong: order statistics replace the sampling of subsets.

    Unscored samples (not finite) leave the group and get 0. Groups with equal rewards also get 0, as do
    groups with fewer than ``k`` + 1 scored samples, which have one try or none.

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
            group_rewards = rewards[rows].double().tolist()
            out[rows] = torch.tensor(
                _pass_at_k(group_rewards, k, eps), dtype=out.dtype, device=rewards.device
            )
    return typed_like(out, rewards)


def _pass_at_k(values: list[float], k: int, eps: float) -> list[float]:
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


def _zero_nonfinite(values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    return torch.where(torch.isfinite(values), values, 0.0)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    estimator.__name__: estimator
    for estimator in (
        grpo, dr_grpo, rloo, rloo_normalized, reinforce_pp, flash_reinforce, reinforce_pp_baseline, remax,
        opo, pass_at_k, gdpo, gpg, maxrl, grpo_passk,
    )
}  # fmt: skip
# Keyword arguments of each estimator: settings, or inputs that `credit_assignment` computes from groups.
ADVANTAGE_INPUTS = {
    name: tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
    for name, function in ADVANTAGES.items()
}
