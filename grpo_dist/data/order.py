"""Decides which prompts a step samples.

The plain order is a function of (seed, step), so resuming needs only the step number. Other orders also
depend on earlier samples, and a checkpoint stores their state.

Curriculum by observed pass rate: prompts that are solved sometimes are sampled more often. The learning
signal of a group with pass rate p is proportional to the variance of its rewards, p (1 - p): zero if all
samples are correct or all are wrong. Pass rates are running averages with decay. Unseen prompts count as half
correct, so a run starts with equal weights. A user-supplied order is a function that chooses the prompts of a
batch by these rates.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from grpo_dist.config.data import UserOrderConfig
from grpo_dist.data.columns import uids_of
from grpo_dist.plugins.inputs import OrderInputs
from grpo_dist.plugins.user_code import ORDER, call, call_in_time, failures_named, load
from grpo_dist.types import Group, Prompt, correctness

_DECAY = 0.5  # weight of earlier observations when a prompt is observed again
_FLOOR = 0.02  # weight of a prompt that is always correct or always wrong, since the policy changes


@dataclass(frozen=True, slots=True)
class OrderState:
    """State of an order in a checkpoint.

    ``position``, ``waiting`` and ``left_out`` (skips by uid, see `stream.SolvedPrompts`) belong to
    `stream.PromptStream`; where groups are launched one by one (`batch.order` completion), ``position``
    counts the calls of any other order. ``pass_rates`` belong to `Curriculum`; ``pools`` (useful, useless),
    ``outcomes`` (right, wrong, by uid) and ``reward_scales`` (see `pools.RewardScale`, by source) to
    `pools.PoolOrder`; ``lengths`` (expected tokens by uid) to `stream.LengthOrder`.
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
        """Return order indices of distinct prompts: the prompts of ``batch``, then spare ones."""

    def prompt(self, index: int) -> int:
        """Return the prompt, 0..n-1, of an order index."""

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        """Record that a batch took ``indices`` and sampled the prompts of these groups."""

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

        n = 5, per_step = 3    steps 0 and 1 take the five prompts of epoch 0 and the first of epoch 1

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
    orders = _short_epochs(n, per_step, seed)
    while len(orders) <= epoch:
        orders.append(_follow(orders[-1], n, per_step, seed, len(orders)))
    return orders[epoch]


@lru_cache(maxsize=4)
def _short_epochs(n: int, per_step: int, seed: int) -> list[np.ndarray]:
    """Return the first epochs, to which `_epoch` appends: each depends on all earlier ones."""
    return [shuffled(n, seed, 0)]


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
    """Return the plain permutation of an epoch, int64 [n], read-only; a negative epoch counts as 0."""
    return np.random.default_rng((seed, max(epoch, 0))).permutation(n)


# By pass rate


Rates = dict[str, tuple[float, float]]  # uid -> (correct, scored), both decayed


class Curriculum:
    """Draws prompts by observed pass rate, deterministic in rates, seed and batch.

    An order index is the index of a prompt.
    """

    def __init__(
        self, uids: Sequence[str], per_batch: int, *, seed: int, rates: Mapping[str, tuple[float, float]]
    ) -> None:
        """``per_batch`` is the number of prompts a batch takes, including spare ones."""
        self._uids, self._per_batch, self._seed = list(uids), per_batch, seed
        self._rates: Rates = {uid: (right, scored) for uid, (right, scored) in rates.items()}

    @property
    def state(self) -> OrderState:
        return OrderState(pass_rates=dict(self._rates))

    def prompt(self, index: int) -> int:
        return index

    def trained(self, indices: Sequence[int], sampled: Sequence[Group]) -> None:
        """Update the pass rates from the rewards."""
        for group in sampled:
            right = correctness(group)
            scored = right[~np.isnan(right)]
            before = self._rates.get(group.prompt.uid, (0.0, 0.0))
            self._rates[group.prompt.uid] = (
                _DECAY * before[0] + float(scored.sum()),
                _DECAY * before[1] + float(len(scored)),
            )

    def take(self, batch: int) -> list[int]:
        """Draw by weight without replacement (Gumbel top-k; Efraimidis and Spirakis 2006)."""
        noise = np.random.default_rng((self._seed, batch, 2)).gumbel(size=len(self._uids))
        return np.argsort(-(np.log(self._weights()) + noise), kind="stable")[: self._per_batch].tolist()

    def _weights(self) -> np.ndarray:
        """Compute float64 [prompts]; 0.25 for an unseen prompt."""
        right, scored = np.array([self._rates.get(uid, (0.0, 0.0)) for uid in self._uids]).T
        share = (right + 1.0) / (scored + 2.0)
        return np.maximum(share * (1.0 - share), _FLOOR)


class UserOrder(Curriculum):
    """Takes the prompts that a user's function chooses. Its state is the pass rates of `Curriculum`."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_batch: int,
        order: UserOrderConfig,
        code_paths: Sequence[str],
        *,
        seed: int,
        rates: Mapping[str, tuple[float, float]],
        limit_s: float,
    ) -> None:
        """``per_batch`` is the number of prompts a batch takes, including spare ones; ``limit_s`` the
        deadline of a call.
        """
        super().__init__(uids_of(prompts), per_batch, seed=seed, rates=rates)
        self._prompts, self._name, self._kwargs = prompts, order.name, order.kwargs
        self._code_paths, self._limit_s = code_paths, limit_s

    def take(self, batch: int) -> list[int]:
        """Return the indices that the function chooses.

        Raises ValueError where they are no list of distinct prompts, or come too late.
        """
        inputs = OrderInputs(batch, self._per_batch, self._prompts, dict(self._rates), self._seed)
        choose = partial(chosen, self._name, self._code_paths, self._kwargs, inputs)
        try:
            return call_in_time(choose, self._limit_s, f"{ORDER.title} {self._name}")
        except TimeoutError as error:
            raise ValueError(f"batch {batch}: {error}") from error


def chosen(name: str, code_paths: Sequence[str], kwargs: Mapping[str, Any], inputs: OrderInputs) -> list[int]:
    """Call the function ``name``. Raises ValueError unless it returns distinct indices of prompts."""
    choose = load(ORDER, name, code_paths)
    with failures_named(ORDER, name):
        chosen_indices = call(choose, inputs, kwargs)
    last = len(inputs.prompts) - 1
    try:
        indices = [operator.index(index) for index in chosen_indices]
    except TypeError as error:  # no list, or scores instead of indices
        raise ValueError(
            f"{ORDER.title} {name} returned {str(chosen_indices)[:80]} ({error}); expected {inputs.count} "
            f"different indices of 0 to {last}, as whole numbers"
        ) from error
    wrong = [index for index in indices if not 0 <= index <= last]
    if len(indices) != inputs.count or len(set(indices)) != len(indices) or wrong:
        example = f"{wrong[0]}, which is no prompt" if wrong else f"{len(set(indices))} different ones"
        raise ValueError(
            f"{ORDER.title} {name} returned {len(indices)} indices with {example}; expected {inputs.count} "
            f"different ones of 0 to {last}"
        )
    return indices
