"""What the health watch remembers from step to step; part of every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from grpo_dist.health.drift import TrackedMetric


@dataclass(frozen=True, slots=True)
class HealthState:
    """State after the steps so far.

    Attributes:
        best_reward: greatest mean reward of a step.
        grad_norms: the latest of steps that trained, all above 0, oldest first.
        skipped: steps in a row, up to the last, with a skipped update.
        avoid: steps that the run was rolled back from; they are not trained on.
        tracked: metrics that may drift, by name.
        idle: steps in a row that trained on no token.
        unscored: steps in a row in which no sample could be scored.
    """

    best_reward: float | None = None
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0
    avoid: tuple[int, ...] = ()
    tracked: Mapping[str, TrackedMetric] = field(default_factory=dict)
    idle: int = 0
    unscored: int = 0


def to_json(state: HealthState) -> dict[str, Any]:
    """Convert to JSON values."""
    return asdict(state)


def from_json(values: Mapping[str, Any]) -> HealthState:
    """Undo `to_json`. Of an older version's metrics (`followed`) nothing is kept: tracking restarts. Neither
    are the gradient norms 0 that it remembered of steps without training.
    """
    found = TypeAdapter(HealthState).validate_python({k: v for k, v in values.items() if k != "followed"})
    return replace(found, grad_norms=tuple(norm for norm in found.grad_norms if norm > 0))
