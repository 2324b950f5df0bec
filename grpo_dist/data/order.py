"""Decides which prompts a step samples.

The plain order is a function of (seed, step), so resuming needs only the step number. Other orders also
depend on earlier samples, and a checkpoint stores their state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from grpo_dist.types import Group


@dataclass(frozen=True, slots=True)
class OrderState:
    """State of an order in a checkpoint.

    ``position``, ``waiting`` and ``left_out`` (turns passed over by uid, see `stream.SolvedPrompts`) belong
    to `stream.PromptStream`; ``position`` counts the calls of any other order where groups are launched one
    by one (`batch.order` completion). ``pass_rates`` belong to
    `curriculum.Curriculum`, ``pools`` (useful, useless), ``outcomes`` (right, wrong, by uid),
    ``reward_scales`` (see `pools.RewardScale`, by source) to `pools.PoolOrder`, ``lengths``
    (expected tokens by uid) to `stream.LengthOrder`. A ``reward_range`` of older checkpoints is not read.
    """

    position: int = 0
    waiting: tuple[int, ...] = ()
    pass_rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    pools: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    outcomes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    reward_scales: Mapping[str, tuple[float, float, float, float, float]] = field(default_factory=dict)
    lengths: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)


class PromptOrder(Protocol):
    """Order of prompts, as a sequence of order indices that each stand for one prompt.

    Only the driver calls it, at points determined by step numbers, so the order never depends on which sample
    finishes first.
    """

    def take(self, batch: int) -> list[int]:
        """Return order indices of distinct prompts: those of ``batch``, then spare ones it may need."""

    def prompt(self, index: int) -> int:
        """Return the prompt, 0..n-1, of an order index."""

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        """Record that, of the ``indices`` a batch took, the prompts of these groups were sampled."""

    @property
    def state(self) -> OrderState: ...


class EpochOrder:
    """The plain order of `step_prompts`. An order index is a position in the concatenated epochs."""

    state = OrderState()

    def __init__(self, n: int, per_step: int, *, seed: int) -> None:
        """Raises ValueError when ``per_step`` exceeds ``n``."""
        if per_step > n:
            raise ValueError(f"{per_step} prompts a step cannot be drawn from {n} without repetition")
        self._n, self._per_step, self._seed = n, per_step, seed

    def take(self, batch: int) -> list[int]:
        return list(range(batch * self._per_step, (batch + 1) * self._per_step))

    def prompt(self, index: int) -> int:
        epoch, at = divmod(index, self._n)
        return int(_epoch(self._n, self._per_step, self._seed, epoch)[at])

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        """Do nothing: the order does not depend on samples."""


def step_prompts(n: int, per_step: int, seed: int, step: int) -> list[int]:
    """Return the ``per_step`` distinct prompts, 0..n-1, of ``step``.

    Epochs are permutations of all prompts without gaps between them, so every prompt occurs once per epoch
    even if ``per_step`` does not divide ``n``:

        n = 5, per_step = 3    steps 0 and 1 take the five of epoch 0 and the first of epoch 1

    If a prompt would occur twice in a step, at the end of one epoch and the start of the next, the new epoch
    postpones it. Raises ValueError when ``per_step`` exceeds ``n``.
    """
    order = EpochOrder(n, per_step, seed=seed)
    return [order.prompt(index) for index in order.take(step)]


def step_indices(count: int, per_step: int, seed: int, step: int) -> Iterator[int]:
    """Yield the ``per_step`` demonstrations, 0..count-1, of ``step``: epochs, each a permutation drawn from
    the seed, without gaps between them.
    """
    for index in range(step * per_step, (step + 1) * per_step):
        epoch, at = divmod(index, count)
        yield int(shuffled(count, seed, epoch)[at])


@lru_cache(maxsize=4)
def _epoch(n: int, per_step: int, seed: int, epoch: int) -> np.ndarray:
    # Only the first `per_step` positions of an epoch are rearranged. If epochs are at least two steps long,
    # the previous one therefore ends like its plain permutation. Shorter epochs are replayed from the first.
    if n >= 2 * per_step:
        return _follow(shuffled(n, seed, epoch - 1), n, per_step, seed, epoch)
    return _short_epochs(n, per_step, seed).order(epoch)


@lru_cache(maxsize=4)
def _short_epochs(n: int, per_step: int, seed: int) -> _ShortEpochs:
    return _ShortEpochs(n, per_step, seed)


class _ShortEpochs:
    """Epochs that depend on all earlier ones; keeps the latest, so that consecutive calls need no replay."""

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
    """Return the permutation of ``epoch``, without repeats in the step it shares with ``before``."""
    order = shuffled(n, seed, epoch)
    head = -(epoch * n) % per_step  # prompts of this epoch that complete the shared step
    if head == 0:
        return order
    started = set(before[-(per_step - head) :].tolist())
    first = [i for i in order.tolist() if i not in started][:head]
    taken = set(first)
    return np.array(first + [i for i in order.tolist() if i not in taken])


@lru_cache(maxsize=4)
def shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the plain permutation of an epoch, int64 [n], read-only; that of epoch 0 for a negative one."""
    return np.random.default_rng((seed, max(epoch, 0))).permutation(n)
