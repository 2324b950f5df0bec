"""Which prompts a step samples.

In the plain order that is a function of (seed, step), so that resuming needs a step number and nothing else.
Other orders follow from what was sampled before, too, and a checkpoint keeps what they remember.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from grpo_dist.types import Group


@dataclass(frozen=True, slots=True)
class OrderState:
    """What an order remembers. ``position``, ``waiting``: see `stream.PromptStream`; ``pass_rates``: see
    `curriculum.Curriculum`.
    """

    position: int = 0
    waiting: tuple[int, ...] = ()
    pass_rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class PromptOrder(Protocol):
    """Asked by the driver alone, at moments that follow from step numbers, so that it never depends on which
    sample is finished first. What it gives are places, each of one prompt.
    """

    def take(self, batch: int) -> list[int]:
        """Places of different prompts: those of ``batch``, and then those it may ask for besides."""

    def prompt(self, place: int) -> int:
        """Index 0..n-1."""

    def trained(self, places: Sequence[int], sampled: Sequence[Group]) -> None:
        """Of the ``places`` that a batch took, the prompts of these groups were sampled."""

    @property
    def state(self) -> OrderState: ...


class EpochOrder:
    """The plain order: `step_prompts`. A place is a position in the epochs, one after the other."""

    state = OrderState()

    def __init__(self, n: int, per_step: int, *, seed: int) -> None:
        """Raises ValueError when ``per_step`` exceeds ``n``."""
        if per_step > n:
            raise ValueError(f"{per_step} prompts a step cannot be drawn from {n} without repetition")
        self._n, self._per_step, self._seed = n, per_step, seed

    def take(self, batch: int) -> list[int]:
        return list(range(batch * self._per_step, (batch + 1) * self._per_step))

    def prompt(self, place: int) -> int:
        epoch, at = divmod(place, self._n)
        return int(_epoch(self._n, self._per_step, self._seed, epoch)[at])

    def trained(self, places: Sequence[int], sampled: Sequence[Group]) -> None:
        """Nothing follows from it."""


def step_prompts(n: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices 0..n-1 of the prompts of ``step``; ``per_step`` different ones.

    Epochs follow each other without a gap, each a permutation of all prompts, so every prompt comes once per
    epoch also where ``per_step`` does not divide ``n``:

        n = 5, per_step = 3    steps 0 and 1 take epoch 0's five and epoch 1's first

    A prompt that would come twice within one step, from the end of one epoch and the start of the next, gives
    its place to the new epoch's next. Raises ValueError when ``per_step`` exceeds ``n``.
    """
    order = EpochOrder(n, per_step, seed=seed)
    return [order.prompt(index) for index in order.take(step)]


@lru_cache(maxsize=4)
def _epoch(n: int, per_step: int, seed: int, epoch: int) -> np.ndarray:
    # Only the first `per_step` places of an epoch are ever rearranged, so where epochs are at least two steps
    # long, the end of the one before is that of its plain permutation. Short epochs are followed from the
    # beginning.
    if n >= 2 * per_step:
        return _follow(shuffled(n, seed, epoch - 1), n, per_step, seed, epoch)
    return _short_epochs(n, per_step, seed).order(epoch)


@lru_cache(maxsize=4)
def _short_epochs(n: int, per_step: int, seed: int) -> _ShortEpochs:
    return _ShortEpochs(n, per_step, seed)


class _ShortEpochs:
    """Each follows from all before it; asked for one after the other they are not begun anew each time."""

    def __init__(self, n: int, per_step: int, seed: int) -> None:
        self._settings = n, per_step, seed
        self._epoch, self._order = 0, shuffled(n, seed, 0)

    def order(self, epoch: int) -> np.ndarray:
        n, per_step, seed = self._settings
        if epoch < self._epoch:
            self._epoch, self._order = 0, shuffled(n, seed, 0)
        while self._epoch < epoch:
            self._epoch += 1
            self._order = _follow(self._order, n, per_step, seed, self._epoch)
        return self._order


def _follow(before: np.ndarray, n: int, per_step: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of ``epoch``, whose first places hold nothing of the step that the epoch before it left
    unfinished.
    """
    order = shuffled(n, seed, epoch)
    head = -(epoch * n) % per_step  # prompts of this epoch that fill that step up
    if head == 0:
        return order
    begun = set(before[-(per_step - head) :].tolist())
    first = [i for i in order.tolist() if i not in begun][:head]
    taken = set(first)
    return np.array(first + [i for i in order.tolist() if i not in taken])


@lru_cache(maxsize=4)
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [n], not to be written to: all prompts in the order of an epoch; of one before the first, the
    first's.
    """
    return np.random.default_rng((seed, max(epoch, 0))).permutation(n)
