"""Moments of all rewards so far, for `algorithm.reward_norm` running.

Moments().updated([1, 0]).updated([0, 0])   count 4, mean 0.25, deviation 0.5

Imports no torch: a plan simulates the loop, whose state includes these moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Moments:
    """``squares``: sum of squared differences from the mean, which is exact where sums of squares cancel."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """Sample deviation (ddof 1); 0 for fewer than two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def updated(self, rewards: np.ndarray) -> Moments:
        """Return these moments with ``rewards`` [B] added; non-finite rewards add nothing.

        The pairwise update of Chan, Golub and LeVeque 1979, in float64.
        """
        new = rewards[np.isfinite(rewards)].astype(np.float64)
        if not len(new):
            return self
        mean = float(new.mean())
        squares = float(np.square(new - mean).sum()) if bool((new != new[0]).any()) else 0.0
        count, difference = self.count + len(new), mean - self.mean
        return Moments(
            count,
            self.mean + difference * len(new) / count,
            self.squares + squares + difference**2 * self.count * len(new) / count,
        )
