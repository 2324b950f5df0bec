"""What is due when, and the learning rate, as functions of the step or update number, so that resuming needs
nothing but that number.
"""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    update: int,
    *,
    lr: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup: int,
    total: int,
    min_ratio: float,
) -> float:
    """Rate of optimiser update ``update`` (0, 1, ...) out of ``total``.

    Rises linearly over ``warmup`` updates, the first of which already moves: with warmup 4, updates 0..4 run
    at 1/5, 2/5, 3/5, 4/5, 1 of ``lr``. Then stays, or falls to ``min_ratio * lr`` at the last update,
    linearly or along half a cosine.
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
