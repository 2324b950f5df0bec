"""Slow drift of a run away from what it was itself: without a number that somebody must choose, so it is
always watched.

Of a few metrics the mean over the latest 20 steps is compared with that over 20 earlier ones of the same
run, its first or its best. Whether the entropy of a model is 2 or 0.2 when all is well, nobody can say
beforehand; that it is a tenth of what it was can be seen. Such a comparison is coarse, so it only warns: what
skips, stops or goes back is a bound of `health`, and the warning names it.

The length of completions is deliberately not compared: one that learns to reason may well write ten times as
much. Where growth is no good any more, completions are cut off or loop, and both are watched.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

DRIFTING = "health/drifting"
WINDOW = 20  # steps: single ones are noise, and within 20 a drift has not done much yet
_NOISE = 4  # standard errors; that of two means of 20 steps is a third of what single steps scatter by


@dataclass(frozen=True, slots=True)
class Period:
    """Of a metric over steps ``first`` to ``last``: the mean, and its standard error by how steps scatter."""

    first: int
    last: int
    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Followed:
    """What is remembered of a metric. ``recent``: the latest steps that have it, with its values, oldest
    first; ``reference``: what they are compared with; ``since``: the step at which it began to drift, None:
    it does not.
    """

    recent: tuple[tuple[int, float], ...] = ()
    reference: Period | None = None
    since: int | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """A condition. ``key``: of `health`, the bound of this metric; ``words``: before the reference's mean;
    ``reference``: (the one so far, recent) -> the one from now on; ``holds``: (recent, reference) -> whether
    the metric drifts.
    """

    metric: str
    key: str
    words: str
    reference: Callable[[Period | None, Period], Period]
    holds: Callable[[Period, Period], bool]


def _first(reference: Period | None, recent: Period) -> Period:
    return reference or recent


def _best(reference: Period | None, recent: Period) -> Period:
    return recent if reference is None or recent.mean > reference.mean else reference


def _collapsed(recent: Period, best: Period) -> bool:
    """A run that learns stays near its best, harder problems now and then aside; half of it gone is a
    collapse. Half of a best that is not above 0 says nothing. And the best of many periods is partly luck:
    where rewards scatter about 0, or almost none is right, half of it goes by chance again and again, so that
    the fall must be more than chance explains.
    """
    fall, by_chance = best.mean - recent.mean, math.hypot(best.error, recent.error)
    return best.mean > 0 and recent.mean < best.mean / 2 and fall > _NOISE * by_chance


def _exhausted(recent: Period, first: Period) -> bool:
    """Learning costs entropy, and half of it or more may go on the way; with a tenth left, samples of a
    prompt are nearly the same, and the policy explores no more. A task with one right answer ends there, too,
    once it is solved: that is warned of, for the numbers are the same, and there is nothing more to learn.
    """
    return recent.mean < first.mean / 10


def _took_over(recent: Period, first: Period) -> bool:
    """Of a share. Below half it may be a tight limit or hard problems, and most samples still teach. And
    twice that of the first steps: a model with random weights ends no completion and writes nothing but
    garbage from the beginning, which is no drift. What began above half cannot double, and needs a bound.
    """
    return recent.mean >= 0.5 and recent.mean >= 2 * first.mean


DRIFTS = (
    Drift("reward/mean", "reward_below_share", "less than half of the best,", _best, _collapsed),
    Drift("policy/entropy", "entropy_below", "less than a tenth of", _first, _exhausted),
    Drift("rollout/truncated_share", "truncated_above", "at least twice the", _first, _took_over),
    Drift("rollout/garbage_share", "garbage_above", "at least twice the", _first, _took_over),
)


def follow(known: Mapping[str, Followed], step: int, metrics: Mapping[str, float]) -> dict[str, Followed]:
    """What is remembered, by metric, after ``step``: the same of one that the step lacks, or that is not a
    number.
    """
    found = {}
    for drift in DRIFTS:
        before, value = known.get(drift.metric, Followed()), metrics.get(drift.metric, math.nan)
        found[drift.metric] = _with(drift, before, step, value)
    return found


def drifting(followed: Mapping[str, Followed]) -> int:
    """How many metrics drift."""
    return sum(one.since is not None for one in followed.values())


def begun(followed: Mapping[str, Followed], step: int) -> Iterator[str]:
    """Of what drifts since ``step``, a message each."""
    for drift in DRIFTS:
        one = followed.get(drift.metric, Followed())
        if one.since == step and one.reference is not None:
            yield _said(drift, _period(one.recent), one.reference)


def _with(drift: Drift, known: Followed, step: int, value: float) -> Followed:
    if not math.isfinite(value):
        return known
    values = (*known.recent, (step, value))[-WINDOW:]
    if len(values) < WINDOW:
        return replace(known, recent=values)
    recent = _period(values)
    reference = drift.reference(known.reference, recent)
    began = step if known.since is None else known.since
    return Followed(values, reference, began if drift.holds(recent, reference) else None)


def _period(values: Sequence[tuple[int, float]]) -> Period:
    numbers = [value for _, value in values]
    error = statistics.stdev(numbers) / math.sqrt(len(numbers))
    return Period(values[0][0], values[-1][0], statistics.fmean(numbers), error)


def _said(drift: Drift, recent: Period, reference: Period) -> str:
    return (
        f"{drift.metric} drifts: {_told(recent)}, {drift.words} {_told(reference)}. This only warns; what "
        f"acts on it is `health.{drift.key}`"
    )


def _told(period: Period) -> str:
    return f"{period.mean:.4g} over steps {period.first} to {period.last}"
