"""Bounds of `health` on the metrics of a step, as numbers.

The metrics of a batch are known before it is trained on; those of the policy in the middle of the update,
before the weights move.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from grpo_dist.config import HealthConfig

GRAD_NORM = "policy/grad_norm"
IN_A_ROW = "health/skipped_in_a_row"
SKIPPED = "health/skipped_updates"  # of the step: not finite, or beyond a bound
REFUSED = "health/refused_"  # followed by the key of a bound: the skipped updates that were beyond it
BAD_WEIGHTS = "health/bad_weights"  # 1: weights are not finite after the step
_ENOUGH = 5  # gradient norms for a median

# Keys of `health`, whose ending names the side, and the metrics that they bound: those of
# `loop.metrics.rollout_metrics`, of an update of the policy, and counts of `HealthWatch.examine`.
_BOUNDED = {
    "batch": {"truncated_above": "rollout/truncated_share", "degenerate_above": "rollout/degenerate_share"},
    "update": {
        "entropy_below": "policy/entropy",
        "mismatch_above": "mismatch/logprob_diff_mean",
        "kl_above": "ref/kl",
    },
    "run": {"skipped_steps_above": IN_A_ROW},
}
UPDATE_METRICS = (*_BOUNDED["update"].values(), GRAD_NORM)  # metrics of an update that have bounds


@dataclass(frozen=True, slots=True)
class HealthState:
    """State after the steps so far.

    Attributes:
        best_reward: greatest mean reward of a step.
        grad_norms: the latest of steps that trained, all above 0, oldest first.
        skipped: steps in a row, up to the last, with a skipped update.
        avoid: steps that the run was rolled back from; they are not trained on.
        idle: steps in a row that trained on no token.
        unscored: steps in a row in which no sample could be scored.
    """

    best_reward: float | None = None
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0
    avoid: tuple[int, ...] = ()
    idle: int = 0
    unscored: int = 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HealthState:
        """Undo `dataclasses.asdict`."""
        return TypeAdapter(cls).validate_python(values)


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit on one metric. ``words``: where ``value`` comes from, if it is not in the configuration."""

    key: str
    metric: str
    value: float
    above: bool
    words: str = ""

    def is_passed(self, metrics: Mapping[str, float]) -> bool:
        """Compare. A metric that is missing, or NaN, passes no bound."""
        value = metrics.get(self.metric, math.nan)
        return value > self.value if self.above else value < self.value

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Say that ``metrics`` pass the bound."""
        side = "above" if self.above else "below"
        limit = self.words or f"{self.value:g}"
        return f"{self.metric} = {metrics[self.metric]:.4g} is {side} {limit} (`health.{self.key}`)"


def passed(bounds: Sequence[Bound], metrics: Mapping[str, float]) -> list[Bound]:
    """Return those of ``bounds`` that ``metrics`` pass."""
    return [bound for bound in bounds if bound.is_passed(metrics)]


def make_bounds(
    settings: HealthConfig, state: HealthState, *kinds: Literal["batch", "update", "run"]
) -> list[Bound]:
    """Return the bounds on the metrics of a batch, of an update of the policy, or of the run."""
    bounds = [
        Bound(key, metric, float(value), above=key.endswith("_above"))
        for kind in kinds
        for key, metric in _BOUNDED[kind].items()
        if (value := getattr(settings, key)) is not None
    ]
    share, best, norms = settings.reward_below_share, state.best_reward, state.grad_norms
    # A share of a negative best would be above it.
    if "batch" in kinds and share is not None and best is not None and best > 0:
        words = f"{share:g} x {best:.4g}, its greatest"
        bounds.append(Bound("reward_below_share", "reward/mean", share * best, above=False, words=words))
    if "update" in kinds and (spike := settings.grad_norm_spike) is not None and len(norms) >= _ENOUGH:
        median = statistics.median(norms)
        words = f"{spike:g} x {median:.4g}, its median"
        bounds.append(Bound("grad_norm_spike", GRAD_NORM, spike * median, above=True, words=words))
    return bounds
