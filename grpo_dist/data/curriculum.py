"""Curriculum by observed pass rate: prompts that are solved sometimes are sampled more often.

The learning signal of a group with pass rate p is proportional to p (1 - p), the variance of its rewards:
zero if all samples are correct or all are wrong. Pass rates are running averages with decay. Unseen prompts
count as half correct, so a run starts with equal weights.

A user-supplied order is a function that chooses the prompts of a batch by these rates.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from grpo_dist.config.data import UserOrderConfig
from grpo_dist.data.order import OrderState
from grpo_dist.data.repeats import uids_of
from grpo_dist.plugins.inputs import OrderInputs
from grpo_dist.plugins.user_code import ORDER, call, call_in_time, failures_named, load
from grpo_dist.types import Group, Prompt, correctness

_DECAY = 0.5  # weight of earlier observations when a prompt is observed again
_FLOOR = 0.02  # weight of a prompt that is always correct or always wrong, since the policy changes

Rates = dict[str, tuple[float, float]]  # uid -> (correct, scored), both decayed


class Curriculum:
    """Draws prompts by observed pass rate, deterministic in rates, seed and batch.

    An order index is the index of a prompt.
    """

    def __init__(
        self, uids: Sequence[str], per_batch: int, *, seed: int, rates: Mapping[str, tuple[float, float]]
    ) -> None:
        """``per_batch`` is the number of prompts a batch takes, including those it may not need."""
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
    """Takes the prompts that the function names. Its state are the pass rates, as `Curriculum` keeps them."""

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
        """``per_batch`` is the number of prompts a batch takes, including those it may not need; ``limit_s``
        the deadline of a call.
        """
        super().__init__(uids_of(prompts), per_batch, seed=seed, rates=rates)
        self._prompts, self._name, self._kwargs = prompts, order.name, order.kwargs
        self._code_paths, self._limit_s = code_paths, limit_s

    def take(self, batch: int) -> list[int]:
        """Return what the function chooses.

        Raises ValueError where that is no list of distinct prompts, or is not there in time.
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
    except TypeError as error:  # no list, or scores in place of indices
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
