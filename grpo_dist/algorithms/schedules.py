"""Learning rate and other schedules as functions of the step or update number, so that resuming needs only
that number; and the controller of a temperature and of the KL term's weight.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

_LARGEST_ERROR = 0.2  # bound on the controller's relative error in one step


def learning_rate(
    update: int,
    *,
    lr: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup: int,
    total: int,
    min_ratio: float,
) -> float:
    """Return the learning rate of optimiser update ``update`` (0, 1, ...) out of ``total``.

    Rises linearly over ``warmup`` updates, starting above 0: with warmup 4, updates 0..4 run at 1/5, 2/5,
    3/5, 4/5, 1 of ``lr``. Then stays, or falls to ``min_ratio * lr`` at the last update, linearly or along
    half a cosine.
    """
    if update < warmup:
        return lr * (update + 1) / (warmup + 1)
    if schedule == "constant":
        return lr
    progress = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
    fall = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return lr * (min_ratio + (1 - min_ratio) * fall)


def is_due(step: int, every: int) -> bool:
    """Return whether ``step`` (from 1) is a multiple of ``every``; never if that is 0."""
    return every > 0 and step % every == 0


def latest(points: Sequence[tuple[int, int]], step: int) -> int:
    """Return the value of the last of ``points`` (step, value) at or before ``step``: (0, 8), (5, 16) give 8
    up to step 4, and 16 from step 5 on. The first point is at step 0.
    """
    return points[bisect_right([at for at, _ in points], step) - 1][1]


def interpolated(points: Sequence[tuple[int, float]], step: int) -> float:
    """Return the value at ``step``, linear between ``points`` (step, value) and constant after the last:
    (0, 1.0), (10, 0.5) give 0.75 at step 5. The first point is at step 0.
    """
    after = bisect_right([at for at, _ in points], step)
    if after == len(points):
        return points[-1][1]
    (begin, low), (end, high) = points[after - 1], points[after]
    return low + (high - low) * (step - begin) / (end - begin)


def steer(value: float, measured: float, *, target: float, gain: float) -> float:
    """Return ``value`` * (1 + gain * clip(measured / target - 1, -0.2, 0.2)): the proportional controller of
    Ziegler et al. 2019, arXiv:1909.08593, section 2.2, for the weight of a KL term. A temperature has a
    ``gain`` below 0: entropy rises with it.

    Args:
        measured: KL or entropy, nats per token. NaN changes nothing.
        target: wanted KL or entropy, nats per token, above 0.
    """
    if math.isnan(measured):
        return value
    error = min(max(measured / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return value * (1.0 + gain * error)
