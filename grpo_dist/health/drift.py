"""Detects slow drift of a metric away from the run's own history. It needs no thresholds, so it is always on.

The moving average of a metric is compared with an earlier one: the first, the least or the best. No one can
say beforehand whether a healthy entropy is 2 or 0.2, but a fall to a tenth is visible. The comparison is
coarse, so it only warns; the bound of `health` that the warning names can skip, stop or roll back. The first
5 steps are enough for a reference, since a learning rate that is too high ruins a policy before the 10th. A
collapse within the first 3 steps is not detected.

Two things are deliberately not watched. The length of completions: a model that learns to reason may write
ten times as much. When growth turns bad, completions are truncated or loop, and both are watched. And an
entropy that rises: an entropy bonus or a wider upper clip is meant to raise it, to several times a low start.
A policy that falls apart loses its reward, or writes degenerate text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

DRIFTING = "health/drifting"
_RATE = 0.1  # weight of a step in the average; a collapse to 0 halves it in 7 steps
_SCATTER_RATE = 0.02  # of the variance: slower, so that a collapse does not count as noise
_REFERENCE_STEPS = 5  # steps before the average serves as a reference, before an early collapse is over
_FIRST_STEPS = 20  # steps before the first warning
_NOISE = 7  # standard errors: of 500 steps the best and the worst average are often 5 apart, but seldom 7


@dataclass(frozen=True, slots=True)
class TrackedMetric:
    """What is remembered of a metric.

    Attributes:
        steps: that had the metric.
        latest: its value at the last of them.
        average: its moving average, the mean in the first ten steps.
        scatter: variance of single steps about the course of the run: half the mean squared difference of
            successive ones (von Neumann 1941). A collapse counts in one difference only.
        reference: the average that it is compared with, None before the fifth step.
        reference_step: the step of that average.
        since: the step at which the metric began to drift; None: it does not.
    """

    steps: int = 0
    latest: float = 0.0
    average: float = 0.0
    scatter: float = 0.0
    reference: float | None = None
    reference_step: int = 0
    since: int | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """A condition on a metric.

    Attributes:
        key: the bound of `health` on this metric.
        words: what stands before the reference in the warning.
        replaces: (average, reference) -> whether the average is the new reference.
        holds: (metric with its new average, reference) -> whether it drifts. A metric that drifts already
            does until that is clearly over; otherwise one that stays at the threshold would cause a warning
            again and again.
    """

    metric: str
    key: str
    words: str
    replaces: Callable[[float, float], bool]
    holds: Callable[[TrackedMetric, float], bool]


def _collapsed(now: TrackedMetric, best: float) -> bool:
    """A fall by half of the best is a collapse, from 0.6 to 0.3 as from -0.2 to -0.3.

    A run that learns stays near its best, apart from harder problems now and then. But the best of many
    averages is partly luck: where rewards scatter about 0, or almost none is right, chance takes half of it
    again and again. So the fall must also exceed what chance explains. The drift ends when half of the fall
    is regained.

    Chance is what independent steps explain. Of 100 simulated runs of 500 steps of 32 samples, half of them
    -1 and half 1, none causes a warning; 2 do when one sample in 200 is right. A reward that wanders, each
    step near the one before, does lose half of its best at times: with mean 0.3, standard deviation 0.08 and
    a correlation of 0.95 from step to step, three runs in four cause warnings.
    """
    error = math.sqrt(now.scatter * 2 * _RATE / (2 - _RATE))  # of the difference of two averages
    least = max(abs(best) / 2, _NOISE * error)
    return best - now.average > (least if now.since is None else least / 2)


def _exhausted(now: TrackedMetric, first: float) -> bool:
    """Less than a tenth of the entropy is left. The drift ends at a fifth.

    Learning costs entropy, often half of it or more. With a tenth left, samples of a prompt are nearly the
    same, and the policy no longer explores. A solved task with one right answer ends there too, and causes a
    warning: the numbers are the same, and there is nothing more to learn.
    """
    return now.average < first / (10 if now.since is None else 5)


def _took_over(now: TrackedMetric, least: float) -> bool:
    """A share is at least a half, and twice the least so far. The drift ends below four fifths of that.

    Below a half the cause may be a tight limit or hard problems, and most samples are still useful. A model
    with random weights ends no completion and writes degenerate text from the start, which is no drift:
    hence twice the least. A share that was never below a half cannot double, and needs a bound.
    """
    limit = max(0.5, 2 * least)
    return now.average >= (limit if now.since is None else 0.8 * limit)


def _is_greater(average: float, reference: float) -> bool:
    return average > reference


def _is_less(average: float, reference: float) -> bool:
    return average < reference


def _never(average: float, reference: float) -> bool:
    return False


DRIFTS = (
    Drift(
        "reward/mean", "reward_below_share", "lower by more than half of the best,", _is_greater, _collapsed
    ),
    Drift("policy/entropy", "entropy_below", "less than a tenth of", _never, _exhausted),
    Drift("rollout/truncated_share", "truncated_above", "at least twice the least,", _is_less, _took_over),
    Drift("rollout/degenerate_share", "degenerate_above", "at least twice the least,", _is_less, _took_over),
)


def track(
    metrics_so_far: Mapping[str, TrackedMetric], step: int, metrics: Mapping[str, float]
) -> dict[str, TrackedMetric]:
    """Add the metrics of ``step``. A metric that the step lacks, or that is not finite, changes nothing."""
    tracked = {}
    for drift in DRIFTS:
        before, value = metrics_so_far.get(drift.metric, TrackedMetric()), metrics.get(drift.metric, math.nan)
        tracked[drift.metric] = _update(drift, before, step, value) if math.isfinite(value) else before
    return tracked


def count_drifting(tracked: Mapping[str, TrackedMetric]) -> int:
    """Count the metrics that drift."""
    return sum(one.since is not None for one in tracked.values())


def new_drifts(tracked: Mapping[str, TrackedMetric], step: int) -> Iterator[str]:
    """Yield a message for each metric that started to drift at ``step``."""
    for drift in DRIFTS:
        one = tracked.get(drift.metric, TrackedMetric())
        if one.since == step:
            yield (
                f"{drift.metric} drifts: its moving average is {one.average:.4g}, {drift.words} "
                f"{one.reference:.4g} at step {one.reference_step}. This is only a warning; to act on it, "
                f"set `health.{drift.key}`"
            )


def _update(drift: Drift, tracked: TrackedMetric, step: int, value: float) -> TrackedMetric:
    steps = tracked.steps + 1
    average = tracked.average + max(_RATE, 1 / steps) * (value - tracked.average)
    scatter = tracked.scatter
    if tracked.steps:
        rate = max(_SCATTER_RATE, 1 / tracked.steps)
        scatter += rate * ((value - tracked.latest) ** 2 / 2 - scatter)
    now = replace(tracked, steps=steps, latest=value, average=average, scatter=scatter)
    if steps < _REFERENCE_STEPS:
        return now
    if now.reference is None or drift.replaces(average, now.reference):
        now = replace(now, reference=average, reference_step=step)
    assert now.reference is not None
    if steps < _FIRST_STEPS or not drift.holds(now, now.reference):
        return replace(now, since=None)
    return now if now.since is not None else replace(now, since=step)
