"""What the watches of a run's health remember from step to step; part of every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_dist.health.drift import Followed


@dataclass(frozen=True, slots=True)
class HealthState:
    """What watches remember of the steps so far. ``best_reward``: the greatest mean of a step;
    ``grad_norms``: the latest, oldest first; ``skipped``: steps in a row, up to the last, with an update that
    was not made; ``idle``: steps in a row that trained on no token; ``avoid``: steps that the run was rolled
    back from, and that are not trained on; ``followed``: metrics that may drift, by name.
    """

    best_reward: float | None = None
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0
    avoid: tuple[int, ...] = ()
    followed: Mapping[str, Followed] = field(default_factory=dict)
    idle: int = 0
