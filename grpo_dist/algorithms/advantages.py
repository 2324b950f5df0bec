"""Advantages: from the rewards of a step to one number per sample.

    rewards [0, 0, 1, 1], one group, std "none" -> [-0.5, -0.5, 0.5, 0.5]

``group_ids`` groups the samples of one prompt; ids need be neither sorted nor consecutive.
Statistics are taken in float64 and the result has the type of ``rewards``, float32 for integer rewards. So a
group of equal rewards gets exact zeros: in float32 the mean of eight 0.7s is not 0.7, and dividing that
rounding error by a deviation of the same size gives 0.06 to 0.9.

A reward that is NaN or infinite could not be scored: under every estimator the sample leaves the statistics
and gets advantage 0.

What else an estimator looks at, and what else holds of it, stands in `estimators.ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from grpo_dist.algorithms.best_of_group import gpg, grpo_passk, maxrl
from grpo_dist.algorithms.estimators import ESTIMATORS
from grpo_dist.algorithms.groups import Groups, deviation, is_scored, typed_like
from grpo_dist.algorithms.pass_at_k import pass_at_k


def grpo(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, std: str = "group", eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """Group-relative advantage: (r - mean of its group) / (standard deviation + eps).

    DeepSeekMath (Shao et al. 2024, arXiv:2402.03300), section 4.1.2.

    Args:
        rewards: one per sample; one that is not finite leaves the statistics and gets advantage 0.
        group_ids: samples of one prompt share an id.
        std: ``group``: sample deviation (ddof 1) of the group. ``batch``: sample deviation of the centred
            rewards of all scored samples of the batch, whose mean is 0 (REINFORCE++ with a group baseline,
            Hu et al. 2025, arXiv:2501.03262). ``batch_raw``: sample deviation of the rewards themselves over
            the batch, which is TRL's ``scale_rewards: batch`` and ROLL's ``norm_std_type: batch`` (Lite PPO,
            Liu et al. 2025, arXiv:2508.08221). It is never smaller: it also counts how prompts differ in
            difficulty. ``none``: divide by nothing.
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


def reinforce_pp(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """REINFORCE++: the reward itself; whitening over all tokens of the batch is the baseline.

    Hu et al. 2025 (arXiv:2501.03262), section 3. `algorithm.advantage.whiten` is on with it unless the
    configuration says otherwise.
    """
    return typed_like(_or_zero(rewards.double()), rewards)


def reinforce_pp_baseline(rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """REINFORCE++ with a group baseline: r - mean of its group, whitened over all tokens of the batch.

    Hu et al. 2025 (arXiv:2501.03262). With lengths [5, 3, 1, 4, 2, 5, 2, 3] whitening makes of
    [1, 0, 0, 1, 0, 0, 0, 0] 1.3063945 for a right answer and -0.7348470 for a wrong one.
    """
    return grpo(rewards, group_ids, std="none")


def remax(
    rewards: Real[Tensor, " B"], group_ids: Int[Tensor, " B"], *, baselines: Real[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """ReMax: r - reward of the greedy answer to the same prompt; Li et al. 2023 (arXiv:2310.10505).

    ``baselines``: that reward, one per sample. A sample whose own reward or baseline is not finite gets 0.
    """
    return typed_like(_or_zero(rewards.double() - baselines.double()), rewards)


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
    baseline = group.sum(_or_zero(rewards.double()) * lengths) / tokens.clamp(min=1)
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
    """GDPO: each reward normalised in its group on its own, their weighted sum normalised over the batch.

    Liu et al. 2026 (arXiv:2601.05242). A sum of rewards that is normalised together loses which of them a
    sample earned: (right, bad format) and (wrong, good format) would get the same advantage.

    Args:
        rewards: the weighted sum; only where it is NaN matters: such a sample gets 0 and leaves all
            statistics.
        parts: each reward before weighting.
    """
    known = is_scored(rewards)
    own = torch.where(known, parts, torch.nan)
    total = sum(
        weight * grpo(part.double(), group_ids, std=std, eps=eps)
        for weight, part in zip(weights.tolist(), own, strict=True)
    )
    assert isinstance(total, Tensor)
    # Centred group by group, the sums have mean 0 over the batch already: only their size is normalised.
    scale = (total.square().sum() / max(int(known.sum()) - 1, 1)).sqrt() + eps
    return typed_like(torch.where(known, total / scale, 0.0), rewards)


def _or_zero(values: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    return torch.where(torch.isfinite(values), values, 0.0)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
    "gpg": gpg,
    "maxrl": maxrl,
    "grpo_passk": grpo_passk,
}
# Keyword arguments of each, which the caller provides.
ADVANTAGE_INPUTS = {name: ESTIMATORS[name].inputs for name in ADVANTAGES}
