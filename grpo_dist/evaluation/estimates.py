"""Estimates from the samples of an evaluation, for one problem and for many, with errors and intervals.

    avg@n     share of right samples
    pass@k    chance that one of k samples is right
    maj@k     chance that the most frequent answer of k samples is right; for k = 1 or 2 equal to avg@n
    cons@n    the same with all n samples: another name of maj@n

Problems are drawn at random; the samples of one problem are not independent of each other. So every error is
the error of a mean over problems ("clustered"; Miller 2024, arXiv:2411.00640, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_dist.algorithms.intervals import Z95, wilson


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over ``problems`` with its standard error (NaN for one problem) and a 95 % interval."""

    value: float
    stderr: float
    low: float
    high: float
    problems: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of ``k`` samples is right.

    1 - C(n - c, k) / C(n, k), as a product that neither overflows nor cancels (Chen et al. 2021,
    arXiv:2107.03374, equation 1). With n = 4, c = 1: k = 1 gives 0.25, k = 2 gives 0.5, k = 4 gives 1. Needs
    k <= n.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples")
    if num_samples - num_correct < k:
        return 1.0
    misses = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / misses))


def measures_of_problem(
    correct: np.ndarray, ks: Sequence[int], answers: Sequence[int] | None = None
) -> dict[str, float]:
    """Compute the measures of one problem, by name. A measure that needs more samples is left out.

    Args:
        correct: float [n], 1 (right), 0 (wrong) or NaN (could not be scored: the sample is left out).
        answers: int [n], equal numbers for equal answers, -1 for a sample without an answer; None leaves out
            maj@k and cons@n.
    """
    scored = ~np.isnan(correct)
    right, n, sampled = correct[scored], int(scored.sum()), len(correct)
    measures = {f"pass@{k}": pass_at_k(n, int(right.sum()), k) for k in ks if n >= k}
    if sampled == 1 or n == 0:
        return measures
    measures[f"avg@{sampled}"] = float(right.mean())
    if answers is not None:
        from grpo_dist.evaluation.votes import majority_at_k  # imports the grader

        votes = [answer for answer, is_scored in zip(answers, scored, strict=True) if is_scored]
        measures |= {f"maj@{k}": majority_at_k(right, votes, k) for k in ks if 2 < k <= n}
        measures[f"cons@{sampled}"] = majority_at_k(right, votes, n)
    return measures


def estimate(values: Sequence[float], *, samples: int) -> Estimate:
    """Estimate the mean of ``values`` in [0, 1], one per problem, computed from ``samples`` samples in all.

    The interval is Wilson's (1927) for an effective number of answers: as many independent yes-or-no answers
    as would have the same mean with the same error, at least one per problem and at most ``samples``. It is
    corrected for an error that is itself estimated from few problems (Korn and Graubard 1998, Surv. Methodol.
    24:193). If every value is 0 or 1, it is Wilson's interval. It stays within [0, 1], and has a width at
    0 % and 100 %, too.

    Every number is NaN if there are no values.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0)
    n, mean = len(values), float(np.mean(values))
    stderr = float(np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return Estimate(mean, stderr, *wilson(mean, _effective(values, mean, samples)), n)


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Average the estimates of different sets of problems; each set has the same weight, whatever its size.

    The distances from value to bound are added as variances are, on each side (Zou and Donner 2008, Stat.
    Med. 27:1693). The errors alone do not suffice: the error of 0 of 30 is 0, but its interval is not.

        0 of 30 (0 to 0.1135) and 90 of 100 (0.8256 to 0.9448): 0.45, 0.413 to 0.511

    Every number is NaN if there are no estimates.
    """
    if not estimates:
        return estimate([], samples=0)
    value, sets = float(np.mean([e.value for e in estimates])), len(estimates)
    stderr, below, above = (
        math.sqrt(sum(d**2 for d in distances)) / sets
        for distances in zip(*((e.stderr, e.value - e.low, e.high - e.value) for e in estimates), strict=True)
    )
    return Estimate(value, stderr, value - below, value + above, sum(e.problems for e in estimates))


def _effective(values: Sequence[float], mean: float, samples: int) -> float:
    """Return how many independent yes-or-no answers have a mean with the variance of the problems' mean."""
    n, variance = len(values), float(np.var(values, ddof=1)) if len(values) > 1 else 0.0
    most = max(samples, n)
    if mean in (0.0, 1.0):
        return n
    if variance == 0.0:
        return most
    return min(max(n * mean * (1 - mean) / variance * (Z95 / student(n - 1)) ** 2, n), most)


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, expanded around the normal's (Abramowitz and Stegun 26.7.5).

    Accurate to 0.01 from 4 degrees of freedom on; too small below.
    """
    z, v = Z95, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )
