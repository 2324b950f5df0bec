"""A prompt order of a user's own: a function that chooses the prompts of a batch."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from grpo_dist.config import DataConfig
from grpo_dist.data.curriculum import Curriculum
from grpo_dist.plugins.calling import call, call_in_time
from grpo_dist.plugins.inputs import OrderInputs
from grpo_dist.plugins.kinds import ORDER
from grpo_dist.plugins.loading import load
from grpo_dist.types import Prompt


class OwnOrder(Curriculum):
    """Takes the prompts that the function names. Its state are the pass rates, as `Curriculum` keeps them."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        per_batch: int,
        data: DataConfig,
        code_paths: Sequence[str],
        *,
        seed: int,
        rates: Mapping[str, tuple[float, float]],
        limit_s: float,
    ) -> None:
        """``per_batch`` is the number of prompts a batch takes, including those it may not need; ``limit_s``
        the deadline of a call.
        """
        super().__init__([p.uid for p in prompts], per_batch, seed=seed, rates=rates)
        self._prompts, self._name, self._kwargs = prompts, data.order, data.order_kwargs
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
    given = call(load(ORDER, name, code_paths), inputs, kwargs)
    last = len(inputs.prompts) - 1
    try:
        found = [operator.index(index) for index in given]
    except TypeError as error:  # no list, or scores in place of indices
        raise ValueError(
            f"{ORDER.title} {name} returned {str(given)[:80]} ({error}); expected {inputs.count} different "
            f"indices of 0 to {last}, as whole numbers"
        ) from error
    wrong = [index for index in found if not 0 <= index <= last]
    if len(found) != inputs.count or len(set(found)) != len(found) or wrong:
        shown = f"{wrong[0]}, which is no prompt" if wrong else f"{len(set(found))} different ones"
        raise ValueError(
            f"{ORDER.title} {name} returned {len(found)} indices with {shown}; expected {inputs.count} "
            f"different ones of 0 to {last}"
        )
    return found
