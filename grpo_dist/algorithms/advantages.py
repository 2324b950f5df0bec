"""Advantages: from the rewards of a step to one number per sample.

    rewards [0, 0, 1, 1], one group, std "none" -> [-0.5, -0.5, 0.5, 0.5]

``group_ids`` says which samples answer the same prompt; ids need be neither sorted nor consecutive.
Statistics are taken in float64 and the result has the type of ``rewards``, so that a group of equal rewards
gets exact zeros: in float32 the mean of eight 0.7s is not 0.7, and dividing that rounding error by a
deviation of the same size gives 0.06 to 0.9.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def grpo(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], *, std: str = "group", eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """Group-relative advantage: (r - mean of its group) / (standard deviation + eps).

    DeepSeekMath (Shao et al. 2024, arXiv:2402.03300), section 4.1.2.

    Args:
        rewards: one per sample; NaN could not be scored: it leaves the statistics and gets advantage 0.
        group_ids: samples of one prompt share an id.
        std: ``group``: sample deviation (ddof 1) of the group. ``batch``: sample deviation of the centred
            rewards of all scored samples of the batch, whose mean is 0 (REINFORCE++ with a group baseline,
            Hu et al. 2025, arXiv:2501.03262). ``none``: divide by nothing.
        eps: added to the deviation.

    Returns:
        Advantages. 0 for a group with one scored sample or with equal rewards. For
        [1, 0, 0, 1, 0, 0, 0, 0]: 1.6201816 for a right answer, -0.5400605 for a wrong one.

    Raises:
        ValueError: ``std`` is none of the three.
    """
    known = ~torch.isnan(rewards)
    group = _Groups(group_ids, known)
    centred, spread = group.centre(rewards)
    if std == "none":
        scale = torch.ones_like(centred)
    elif std == "group":
        scale = (group.sum(centred**2) / (group.count - 1).clamp(min=1)).sqrt()[group.index] + eps
    elif std == "batch":
        scale = ((centred**2).sum() / (group.count.sum() - 1).clamp(min=1)).sqrt() + eps
    else:
        raise ValueError(f"std = {std!r}: expected group, batch or none")
    return torch.where(spread, centred / scale, 0.0).to(rewards.dtype)


def dr_grpo(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], *, std: str = "none", eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """Dr. GRPO: r - mean of its group, with no division, which would weight easy and hard prompts up.

    Liu et al. 2025 (arXiv:2503.20783), section 3.2. ``std`` and ``eps`` are there so that all estimators are
    called alike. For [1, 0, 0, 1, 0, 0, 0, 0]: 0.75 and -0.25.
    """
    del std
    return grpo(rewards, group_ids, std="none", eps=eps)


def rloo(
    rewards: Float[Tensor, " B"], group_ids: Int[Tensor, " B"], *, std: str = "none", eps: float | int = 1e-6
) -> Float[Tensor, " B"]:
    """Leave-one-out: r - mean of the other samples of its group = n / (n - 1) * (r - mean of the group).

    Ahmadian et al. 2024 (arXiv:2402.14740), equation 6. For [1, 0, 0, 1, 0, 0, 0, 0]: 0.8571429 and
    -0.2857143.
    """
    del std, eps
    group = _Groups(group_ids, ~torch.isnan(rewards))
    centred, spread = group.centre(rewards)
    factor = group.count / (group.count - 1).clamp(min=1)
    return torch.where(spread, centred * factor[group.index], 0.0).to(rewards.dtype)


class _Groups:
    """Sums over groups of the samples that are ``known``. ``index`` [B]: the group of each sample; ``count``
    [groups].
    """

    def __init__(self, group_ids: Int[Tensor, " B"], known: Bool[Tensor, " B"]) -> None:
        unique, self.index = torch.unique(group_ids, return_inverse=True)
        self._known, self._size = known, len(unique)
        self.count = self.sum(torch.ones_like(known, dtype=torch.float64))

    def sum(self, values: Float[Tensor, " B"]) -> Float[Tensor, " G"]:
        zeros = torch.zeros(self._size, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.index, torch.where(self._known, values.double(), 0.0))

    def centre(self, values: Float[Tensor, " B"]) -> tuple[Float[Tensor, " B"], Bool[Tensor, " B"]]:
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


ADVANTAGES: dict[str, Callable[..., Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
