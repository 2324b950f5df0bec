"""What `update` of a loop of one's own refuses before it trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_dist.config import AlgorithmConfig, DistillationConfig
from grpo_dist.errors import UserError
from grpo_dist.types import Group


def check_division(updates: int, groups: int) -> None:
    """Raise UserError where the groups cannot be split into the updates of a step."""
    if groups == 0 or groups % updates:
        raise UserError(
            f"update(): {groups} groups cannot be split into `batch.updates_per_step` = {updates} equal "
            "parts; pass a multiple of it"
        )


def check_own_advantages(algorithm: AlgorithmConfig, distillation: DistillationConfig) -> None:
    """Raise UserError where advantages of the caller would replace a KL that is part of the run's own."""
    if algorithm.kl.in_reward:
        raise UserError(
            "update(): advantages replace the KL term that `algorithm.kl.in_reward` = true makes part "
            "of the run's own; set it to false: the KL is then in the loss"
        )
    if distillation.teachers and distillation.kl_as == "advantage":
        raise UserError(
            "update(): advantages replace the KL to `distillation.teachers`, which is part of the run's own; "
            "set `distillation.kl` to sampled or top_k, or remove the teachers"
        )


def check_fit(advantages: list[np.ndarray], groups: Sequence[Group]) -> None:
    """Raise UserError where ``advantages`` are not finite numbers [G] for each group."""
    wanted = [(len(group.rollouts),) for group in groups]
    found = [own.shape for own in advantages]
    if found != wanted:
        raise UserError(
            f"update(): advantages have the shapes {found}; expected one array for "
            f"each group, with a number for each sample: {wanted}"
        )
    if not all(np.isfinite(own).all() for own in advantages):
        raise UserError("update(): advantages have a NaN or infinity; use 0 for what is not to be trained on")
