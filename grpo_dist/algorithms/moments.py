"""Mean and deviation of all rewards of a run so far, one step at a time.

Moments().updated([1, 0]).updated([0, 0])   count 4, mean 0.25, deviation 0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Real
from torch import Tensor

from grpo_dist.algorithms.groups import is_scored


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

    def updated(self, rewards: Real[Tensor, " B"]) -> Moments:
        """These moments with ``rewards`` added; what is not finite adds nothing.

        The pairwise update of Chan, Golub and LeVeque 1979, in float64.
        """
        new = rewards[is_scored(rewards)].double()
        if not len(new):
            return self
        mean = float(new.mean())
        squares = float((new - mean).square().sum()) if bool((new != new[0]).any()) else 0.0
        count, difference = self.count + len(new), mean - self.mean
        return Moments(
            count,
            self.mean + difference * len(new) / count,
            self.squares + squares + difference**2 * self.count * len(new) / count,
        )
