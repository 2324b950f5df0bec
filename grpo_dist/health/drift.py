"""Slow drift of a run away from what it was itself: without a number that somebody must choose, so it is
always watched.

Of a few metrics the mean over the latest 20 steps is compared with that over 5 to 20 of the same run, its
first, its least or its best. Whether the entropy of a model is 2 or 0.2 when all is well, nobody can say
beforehand; that it is a tenth of what it was can be seen. Such a comparison is coarse, so it only warns: what
skips, stops or goes back is a bound of `health`, and the warning names it. As few as the first 5 steps are
compared with, since a rate that is too high ruins a policy before the 10th. What is lost within the first 3
is not seen.

Two things are deliberately not watched. The length of completions: one that learns to reason may well write
ten times as much. Where growth is no good any more, completions are cut off or loop, and both are watched.
And an entropy that rises: a bonus for it, or a wider upper clip, is meant to raise it, to several times a low
beginning. A policy that falls apart loses its reward, or writes garbage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

DRIFTING = "health/drifting"
WINDOW = 20  # steps: single ones are noise, and within 20 a drift has not done much yet
SHORT = 5  # steps that are enough to compare with, so that it is known how a run was before an early collapse
_NOISE = 5  # standard errors: of 500 steps the best and the worst 20 are often 4 apart, but seldom 5


@dataclass(frozen=True, slots=True)
class Period:
    """Of a metric over ``steps`` steps that have it, from ``first`` to ``last``."""

    first: int
    last: int
    mean: float
    steps: int = WINDOW


@dataclass(frozen=True, slots=True)
class Followed:
    """What is remembered of a metric. ``recent``: the latest steps that have it, with its values, oldest
    first; ``reference``: what they are compared with; ``since``: the step at which it began to drift, None:
    it does not; ``scatter``: the variance of single steps about the course of the run, by its ``pairs`` of
    successive ones.
    """

    recent: tuple[tuple[int, float], ...] = ()
    reference: Period | None = None
    since: int | None = None
    scatter: float = 0.0
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """``scatter``: as of `Followed`; ``began``: the metric drifts already. Then it does until that is
    clearly over: one that stays at the threshold would be warned of again and again.
    """

    recent: Period
    reference: Period
    scatter: float
    began: bool


@dataclass(frozen=True, slots=True)
class Drift:
    """A condition. ``key``: of `health`, the bound of this metric; ``words``: before the reference's mean;
    ``reference``: (the one so far, recent) -> the one from now on; ``holds``: whether the metric drifts.
    """

    metric: str
    key: str
    words: str
    reference: Callable[[Period | None, Period], Period]
    holds: Callable[[Comparison], bool]


def _first(reference: Period | None, recent: Period) -> Period:
    return reference or recent


def _least(reference: Period | None, recent: Period) -> Period:
    return recent if reference is None or recent.mean < reference.mean else reference


def _best(reference: Period | None, recent: Period) -> Period:
    return recent if reference is None or recent.mean > reference.mean else reference


def _collapsed(of: Comparison) -> bool:
    """A run that learns stays near its best, harder problems now and then aside; a fall by half of it is a
    collapse, from 0.6 to 0.3 as from -0.2 to -0.3. And the best of many periods is partly luck: where rewards
    scatter about 0, or almost none is right, half of it goes by chance again and again, so that the fall must
    be more than chance explains. It is over when half of such a fall is made up for.

    Chance is what independent steps explain: of 200 simulated runs of 500 steps of 32 samples, half of them
    -1 and half 1, none is warned of, and 3 where one sample in 200 is right. A reward that wanders, each step
    near the one before, does lose half of its best at times: with mean 0.3, standard deviation 0.08 and a
    correlation of 0.95 from step to step 179 of 200 are warned of, 1.6 times each on average.
    """
    error = math.sqrt(of.scatter * (1 / of.recent.steps + 1 / of.reference.steps))
    least = max(abs(of.reference.mean) / 2, _NOISE * error)
    return of.reference.mean - of.recent.mean > (least / 2 if of.began else least)


def _exhausted(of: Comparison) -> bool:
    """Learning costs entropy, and half of it or more may go on the way; with a tenth left, samples of a
    prompt are nearly the same, and the policy explores no more. A task with one right answer ends there, too,
    once it is solved: that is warned of, for the numbers are the same, and there is nothing more to learn.
    It is over with a fifth.
    """
    return of.recent.mean < of.reference.mean / (5 if of.began else 10)


def _took_over(of: Comparison) -> bool:
    """Of a share. Below half it may be a tight limit or hard problems, and most samples still teach. And
    twice the least so far: a model with random weights ends no completion and writes nothing but garbage from
    the beginning, which is no drift. What was never below half cannot double, and needs a bound. It is over
    below four fifths of that, 0.4 or more.
    """
    limit = max(0.5, 2 * of.reference.mean)
    return of.recent.mean >= (0.8 * limit if of.began else limit)


DRIFTS = (
    Drift("reward/mean", "reward_below_share", "lower by more than half of the best,", _best, _collapsed),
    Drift("policy/entropy", "entropy_below", "less than a tenth of", _first, _exhausted),
    Drift("rollout/truncated_share", "truncated_above", "at least twice the least,", _least, _took_over),
    Drift("rollout/garbage_share", "garbage_above", "at least twice the least,", _least, _took_over),
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
    known = _appended(known, step, value)
    if len(known.recent) < SHORT:
        return known
    recent = _period(known.recent)
    reference = drift.reference(known.reference, recent)
    scatter = max(known.scatter, _scatter(known.recent))  # of a run that was quiet, and is so no more
    compared = Comparison(recent, reference, scatter, began=known.since is not None)
    holds = recent.steps == WINDOW and drift.holds(compared)
    began = step if known.since is None else known.since
    return replace(known, reference=reference, since=began if holds else None)


def _appended(known: Followed, step: int, value: float) -> Followed:
    recent = (*known.recent, (step, value))[-WINDOW:]
    if not known.recent:
        return replace(known, recent=recent)
    pairs = known.pairs + 1
    scatter = known.scatter + (_scatter(recent[-2:]) - known.scatter) / pairs
    return replace(known, recent=recent, scatter=scatter, pairs=pairs)


def _scatter(values: Sequence[tuple[int, float]]) -> float:
    """The variance of steps by half the mean squared difference of successive ones (von Neumann 1941): that
    about their mean would count a collapse among them as scatter, of which here one difference has its part.

    [1, 3, 1, 3] -> 2; [1, 1, 1, 3] -> 2 / 3
    """
    differences = [after - before for (_, before), (_, after) in pairwise(values)]
    return statistics.fmean(difference * difference for difference in differences) / 2


def _period(values: Sequence[tuple[int, float]]) -> Period:
    mean = statistics.fmean(value for _, value in values)
    return Period(values[0][0], values[-1][0], mean, len(values))


def _said(drift: Drift, recent: Period, reference: Period) -> str:
    return (
        f"{drift.metric} drifts: {_told(recent)}, {drift.words} {_told(reference)}. This only warns; what "
        f"acts on it is `health.{drift.key}`"
    )


def _told(period: Period) -> str:
    return f"{period.mean:.4g} over steps {period.first} to {period.last}"
