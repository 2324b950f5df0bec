"""Which prompts a step trains on: a function of (seed, step), so that resuming needs a step number and
nothing else.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def step_prompts(n: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices 0..n-1 of the prompts of ``step``; ``per_step`` different ones.

    Epochs follow each other without a gap, each a permutation of all prompts, so every prompt comes once per
    epoch also where ``per_step`` does not divide ``n``:

        n = 5, per_step = 3    steps 0 and 1 take epoch 0's five and epoch 1's first

    A prompt that would come twice within one step, from the end of one epoch and the start of the next, gives
    its place to the new epoch's next. Raises ValueError when ``per_step`` exceeds ``n``.
    """
    if per_step > n:
        raise ValueError(f"{per_step} prompts a step cannot be drawn from {n} without repetition")
    first = step * per_step
    return [int(_epoch(n, per_step, seed, i // n)[i % n]) for i in range(first, first + per_step)]


def further_prompts(n: int, own: list[int], seed: int, step: int) -> list[int]:
    """Indices of all prompts that are not ``own``, in the order a step asks for them when it needs more."""
    taken = set(own)
    order = np.random.default_rng((seed, step, 1)).permutation(n).tolist()
    return [i for i in order if i not in taken]


@lru_cache(maxsize=4)
def _epoch(n: int, per_step: int, seed: int, epoch: int) -> np.ndarray:
    # Only the first `per_step` places of an epoch are ever rearranged, so where epochs are at least two steps
    # long, the end of the one before is that of its plain permutation. Short epochs are followed from the
    # beginning.
    if n >= 2 * per_step:
        return _follow(_shuffled(n, seed, epoch - 1), n, per_step, seed, epoch)
    order = _shuffled(n, seed, 0)
    for later in range(1, epoch + 1):
        order = _follow(order, n, per_step, seed, later)
    return order


def _follow(before: np.ndarray, n: int, per_step: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of ``epoch``, whose first places hold nothing of the step that the epoch before it left
    unfinished.
    """
    order = _shuffled(n, seed, epoch)
    head = -(epoch * n) % per_step  # prompts of this epoch that fill that step up
    if head == 0:
        return order
    begun = set(before[-(per_step - head) :].tolist())
    first = [i for i in order.tolist() if i not in begun][:head]
    taken = set(first)
    return np.array(first + [i for i in order.tolist() if i not in taken])


def _shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, max(epoch, 0))).permutation(n)
