"""Reward functions of users: how one is called follows from the names in its signature.

def f(completion, answer, ...)         once for each completion
async def f(completion, answer, ...)   once for each completion, those of a group at the same time
def f(completions, answer, ...)        once for the group, async or not; returns a list of G numbers
def f(steps, ...), kind: process       once for each completion; a number for each step; if async, those of a
                                       group at the same time
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_dist.rewards.group import OF_CALLS, CompletionGroup
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.results import Failure
from grpo_dist.rewards.steps import REDUCE, split_steps


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Of a function of kind process: what separates steps, and how their rewards become one."""

    separator: str
    reduce: str


@dataclass(frozen=True, slots=True)
class StepScores:
    """Rewards of the steps of G completions; NaN: could not be scored."""

    rewards: tuple[np.ndarray, ...]  # G arrays float32 [S_i]
    char_ends: tuple[list[int], ...]  # G lists [S_i], the character at which the next step begins


class OwnFunction:
    """One user function in the processes of ``pool``.

    Raises:
        ValueError: it cannot be loaded, or its signature is not that of its kind.
    """

    def __init__(
        self, path: str, kwargs: Mapping[str, Any], pool: GraderPool, *, steps: StepSettings | None = None
    ) -> None:
        self._path, self._kwargs, self._pool, self._steps = path, kwargs, pool, steps
        self._signature = pool.check(path)
        names = self._signature.names
        if steps is not None and "steps" not in names:
            raise ValueError(
                f"reward function {path!r} of kind process: expected a parameter `steps`, the list of the "
                f"completion's steps; it has {', '.join(sorted(names)) or 'none'}"
            )
        self._takes_group = steps is None and "completions" in names and "completion" not in names

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Columns of the data without which no call succeeds: parameters that nothing else fills."""
        return tuple(sorted(self._signature.required - OF_CALLS - set(self._kwargs)))

    @property
    def asked_columns(self) -> frozenset[str]:
        """Columns of the data that it gets where a row has them: every parameter that nothing else fills."""
        return self._signature.names - OF_CALLS - set(self._kwargs)

    def score(self, group: CompletionGroup) -> tuple[list[float | Failure], StepScores | None]:
        """Return a number, or why there is none, for each completion, and the rewards of its steps if any."""
        if self._steps is not None:
            return self._scored_steps(group, self._steps)
        if self._takes_group:
            size = len(group.completions)
            (result,) = self._pool.call_for_each(self._path, [self._for_group(group)], [size])
            return ([result] * size if isinstance(result, Failure) else [*result]), None
        calls = [self._for_sample(group, i) for i in range(len(group.completions))]
        if self._signature.is_async:
            return self._pool.call_together(self._path, calls), None
        return self._pool.call(self._path, calls), None

    def _scored_steps(
        self, group: CompletionGroup, settings: StepSettings
    ) -> tuple[list[float | Failure], StepScores]:
        split = [split_steps(text, settings.separator) for text in group.completions]
        sizes = [len(steps) for steps in split]
        calls = [
            self._for_sample(group, i) | {"steps": [text for text, _ in steps]}
            for i, steps in enumerate(split)
        ]
        together = self._pool.call_together if self._signature.is_async else self._pool.call_for_each
        values: list[float | Failure] = []
        rewards = []
        for result, size in zip(together(self._path, calls, sizes), sizes, strict=True):
            own = np.array([math.nan] * size if isinstance(result, Failure) else result, np.float64)
            own = np.where(np.abs(own) <= np.finfo(np.float32).max, own, np.nan).astype(np.float32)
            rewards.append(own)
            values.append(result if isinstance(result, Failure) else REDUCE[settings.reduce](own))
        return values, StepScores(tuple(rewards), tuple([end for _, end in steps] for steps in split))

    def _for_sample(self, group: CompletionGroup, i: int) -> dict[str, Any]:
        """Return the keywords of one call. Columns and kwargs come before names that only describe."""
        own: dict[str, Any] = {
            "source": group.source,
            "finish_reason": group.finish_reasons[i],
            "group": list(group.completions),
        }
        if "token_ids" in self._signature.names:
            own["token_ids"] = group.token_ids[i].tolist()
        named = {name: value for name, value in own.items() if name in self._signature.names}
        call = named | self._known(group) | {"completion": group.completions[i]}
        return call | ({"turns": group.turns[i]} if any(group.turns) else {})

    def _for_group(self, group: CompletionGroup) -> dict[str, Any]:
        own: dict[str, Any] = {"source": group.source, "finish_reason": list(group.finish_reasons)}
        if "token_ids" in self._signature.names:
            own["token_ids"] = [ids.tolist() for ids in group.token_ids]
        named = {name: value for name, value in own.items() if name in self._signature.names}
        call = named | self._known(group) | {"completions": list(group.completions)}
        return call | ({"turns": list(group.turns)} if any(group.turns) else {})

    def _known(self, group: CompletionGroup) -> dict[str, Any]:
        return {"answer": group.gold, **group.columns, **self._kwargs}


def noted(results: Sequence[float | Failure]) -> tuple[list[float], list[str]]:
    """Return numbers, NaN for failures, and why each of those failed."""
    numbers = [math.nan if isinstance(result, Failure) else result for result in results]
    return numbers, [result.detail for result in results if isinstance(result, Failure)]
