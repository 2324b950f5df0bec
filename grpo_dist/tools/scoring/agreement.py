"""Where graders of the same completions agree, and where not.

A grader is a reward whose every value is 0 or 1, or the column of somebody's labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of two graders: completions by what the first and the second say; ``unscored`` by at least one."""

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
        """Share on which they say the same; NaN for none."""
        return (self.both + self.neither) / self.scored if self.scored else math.nan

    @property
    def kappa(self) -> float:
        """Cohen's kappa: (rate - chance) / (1 - chance), where chance is how often graders would agree that
        say "right" as often as these two, but at random (Cohen 1960). NaN where chance is 1: each says one
        thing only.

            20 both, 5 only the first, 10 only the second, 15 neither: rate 0.7, chance 0.5, kappa 0.4
        """
        n = self.scored
        if not n:
            return math.nan
        first, second = (self.both + self.only_first) / n, (self.both + self.only_second) / n
        chance = first * second + (1 - first) * (1 - second)
        return (self.rate - chance) / (1 - chance) if chance < 1 else math.nan


def is_grader(values: np.ndarray) -> bool:
    """Whether all that could be scored is 0 or 1; not of what never could be."""
    known = values[~np.isnan(values)]
    return bool(len(known)) and bool(np.isin(known, (0.0, 1.0)).all())


def agreements(graders: Mapping[str, np.ndarray]) -> list[Agreement]:
    """Of every two of ``graders``: float [N], NaN where it could not be scored."""
    return [_agreement(a, graders[a], b, graders[b]) for a, b in combinations(graders, 2)]


def _agreement(first: str, ours: np.ndarray, second: str, theirs: np.ndarray) -> Agreement:
    def count(a: float, b: float) -> int:
        return int(((ours == a) & (theirs == b)).sum())

    unscored = int((np.isnan(ours) | np.isnan(theirs)).sum())
    return Agreement(first, second, count(1, 1), count(1, 0), count(0, 1), count(0, 0), unscored)


def disagreements(graders: Mapping[str, np.ndarray]) -> np.ndarray:
    """Indices of the completions that one grader calls right and another wrong."""
    values = np.array(list(graders.values()))
    return np.flatnonzero((values == 1).any(axis=0) & (values == 0).any(axis=0))
