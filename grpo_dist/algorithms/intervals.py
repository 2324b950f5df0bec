"""Confidence interval of an accuracy, for evaluations and the terminal."""

from __future__ import annotations

import math

Z95 = 1.959963984540054  # z-score of a two-sided 95 % interval


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % Wilson (1927) interval of ``share`` of ``count`` independent answers. 8 of 10: 0.490 to
    0.943.
    """
    width = Z95**2 / count
    centre = (share + width / 2) / (1 + width)
    half = math.sqrt(width * share * (1 - share) + width**2 / 4) / (1 + width)
    return max(0.0, centre - half), min(1.0, centre + half)
