"""Agreement between graders of the same completions.

A grader is a reward whose values are all 0 or 1, or a column of labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True, slots=True)
class Agreement:
    """Confusion counts of two graders. ``unscored``: completions that at least one did not score."""

    first: str
    second: str
    both: int
    only_first: int
    only_second: int
    neither: int
    unscored: int

    @property
    def scored(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def rate(self) -> float:
        """Share of the scored completions on which both agree; NaN without any."""
        return (self.both + self.neither) / self.scored if self.scored else math.nan

    @property
    def kappa(self) -> float:
        """Cohen's kappa (Cohen 1960): (rate - chance) / (1 - chance).

        Chance is the agreement of random graders with the same share of "right" as these two. NaN when chance
        is 1, as each grader has a single verdict.

            20 both, 5 only first, 10 only second, 15 neither: rate 0.7, chance 0.5, kappa 0.4
        """
        n = self.scored
        if not n:
            return math.nan
        first, second = (self.both + self.only_first) / n, (self.both + self.only_second) / n
        chance = first * second + (1 - first) * (1 - second)
        return (self.rate - chance) / (1 - chance) if chance < 1 else math.nan


def is_grader(values: np.ndarray) -> bool:
    """Return True when all scored values are 0 or 1, and at least one was scored."""
    known = values[~np.isnan(values)]
    return bool(len(known)) and bool(np.isin(known, (0.0, 1.0)).all())


def agreements(graders: Mapping[str, np.ndarray]) -> list[Agreement]:
    """Compare every two of ``graders``: float [N] each, NaN for unscored."""
    return [_agreement(a, graders[a], b, graders[b]) for a, b in combinations(graders, 2)]


def _agreement(first: str, ours: np.ndarray, second: str, theirs: np.ndarray) -> Agreement:
    def count(a: float, b: float) -> int:
        return int(((ours == a) & (theirs == b)).sum())

    unscored = int((np.isnan(ours) | np.isnan(theirs)).sum())
    return Agreement(first, second, count(1, 1), count(1, 0), count(0, 1), count(0, 0), unscored)


def disagreements(graders: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the indices of completions that one grader calls right and another wrong."""
    values = np.array(list(graders.values()))
    return np.flatnonzero((values == 1).any(axis=0) & (values == 0).any(axis=0))
