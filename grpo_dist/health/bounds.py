"""Bounds of `health` on what is known of a step, as numbers that it can be held against.

What a batch says of itself is known before it is trained on; what the policy says of it, in the middle of the
update, before the weights move.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_dist.config import HealthConfig
from grpo_dist.health.state import HealthState

GRAD_NORM = "policy/grad_norm"
IN_A_ROW = "health/skipped_in_a_row"
_ENOUGH = 5  # gradient norms for a median

# Key of `health` and the metric it bounds, on the side that the key's name ends with.
_OF_BATCH = (
    ("length_above", "rollout/length_tokens"),
    ("truncated_above", "rollout/truncated_share"),
    ("garbage_above", "rollout/garbage_share"),
)
_OF_UPDATE = (
    ("entropy_below", "policy/entropy"),
    ("mismatch_above", "mismatch/logprob_diff_mean"),
    ("kl_above", "ref/kl"),
)
UPDATE_METRICS = (*(metric for _, metric in _OF_UPDATE), GRAD_NORM)  # of an update, that have bounds
_OF_RUN = (("skipped_steps_above", IN_A_ROW),)


@dataclass(frozen=True, slots=True)
class Bound:
    """``words``: how it came to be ``value``, where it is not what the configuration says."""

    key: str
    metric: str
    value: float
    above: bool
    words: str = ""

    def is_passed(self, metrics: Mapping[str, float]) -> bool:
        """A metric that is missing, or not a number, passes no bound."""
        value = metrics.get(self.metric, math.nan)
        return value > self.value if self.above else value < self.value

    def said(self, metrics: Mapping[str, float]) -> str:
        """That ``metrics`` pass it, in words."""
        side = "above" if self.above else "below"
        limit = self.words or f"{self.value:g}"
        return f"{self.metric} = {metrics[self.metric]:.4g} is {side} {limit} (`health.{self.key}`)"


def passed(bounds: Sequence[Bound], metrics: Mapping[str, float]) -> list[Bound]:
    return [bound for bound in bounds if bound.is_passed(metrics)]


def of_batch(settings: HealthConfig, state: HealthState) -> list[Bound]:
    """On `metrics.rollout_metrics`."""
    return [*_as_configured(settings, _OF_BATCH), *_of_reward(settings, state)]


def of_update(settings: HealthConfig, state: HealthState) -> list[Bound]:
    """On what an update of the policy returns."""
    return [*_as_configured(settings, _OF_UPDATE), *_of_gradient(settings, state)]


def of_run(settings: HealthConfig) -> list[Bound]:
    """On what `HealthWatch.examine` counts."""
    return list(_as_configured(settings, _OF_RUN))


def _as_configured(settings: HealthConfig, table: Sequence[tuple[str, str]]) -> Iterator[Bound]:
    for key, metric in table:
        value = getattr(settings, key)
        if value is not None:
            yield Bound(key, metric, float(value), above=key.endswith("_above"))


def _of_reward(settings: HealthConfig, state: HealthState) -> Iterator[Bound]:
    share, best = settings.reward_below_share, state.best_reward
    # A share of what is not above 0 is no bound from below.
    if share is not None and best is not None and best > 0:
        words = f"{share:g} x {best:.4g}, its greatest"
        yield Bound("reward_below_share", "reward/mean", share * best, above=False, words=words)


def _of_gradient(settings: HealthConfig, state: HealthState) -> Iterator[Bound]:
    spike = settings.grad_norm_spike
    if spike is not None and len(state.grad_norms) >= _ENOUGH:
        median = statistics.median(state.grad_norms)
        words = f"{spike:g} x {median:.4g}, its median"
        yield Bound("grad_norm_spike", GRAD_NORM, spike * median, above=True, words=words)
