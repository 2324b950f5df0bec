"""Registry of rewards by name, and user-supplied reward functions, ``module:function``, whose parameter names
determine how they are called.

def f(completion, answer, ...)         once per completion
async def f(completion, answer, ...)   once per completion, concurrently for the completions of a group
def f(completions, answer, ...)        once per group, async or not; returns a list of G numbers
def f(steps, ...), kind: process       once per completion; returns a number per step; if async, concurrently
                                       for the completions of a group
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from grpo_dist.config import RewardsConfig
from grpo_dist.config.rewards import FunctionConfig, ProcessRewardConfig
from grpo_dist.config.secrets import masked_text, shown_value
from grpo_dist.plugins.user_code import REWARD, UserComponent, registered, resolve_target
from grpo_dist.rewards import builtin
from grpo_dist.rewards.builtin import Builtin
from grpo_dist.rewards.group import OF_CALLS, REDUCE, CompletionGroup, split_steps
from grpo_dist.rewards.pool import Failure, GraderPool
from grpo_dist.rewards.served import Generative, LLMJudge, Remote
from grpo_dist.rewards.unit_tests import UnitTests

REWARDS: dict[str, type[Builtin]] = {
    "math": builtin.Math,
    "format": builtin.Format,
    "exact": builtin.Exact,
    "numeric": builtin.Numeric,
    "repetition": builtin.Repetition,
    "language": builtin.Language,
    "overlong": builtin.Overlong,
    "cosine_length": builtin.CosineLength,
    "relative_length": builtin.RelativeLength,
    "judge": LLMJudge,
    "remote": Remote,
    "generative": Generative,
    "parity": builtin.Parity,
    "random": builtin.Random,
    "environment": builtin.EnvironmentSum,
    "unit_tests": UnitTests,
}


def user_rewards(settings: RewardsConfig) -> tuple[UserComponent, ...]:
    """Return the user-supplied rewards of all sources."""
    return tuple(
        UserComponent(REWARD, r.function, REWARD.key, r.kwargs)
        for r in settings.all_functions
        if ":" in r.function or r.function in registered(REWARD)
        if r.function not in REWARDS
    )


def make(settings: FunctionConfig) -> Builtin:
    """Create a built-in reward. Raises ValueError for a kind or kwargs that it does not accept."""
    check_name(settings)
    reward = REWARDS[settings.function]
    try:
        return reward.model_validate(settings.kwargs)
    except ValidationError as error:
        item = error.errors()[0]
        key = ".".join(str(part) for part in item["loc"])
        fields = ", ".join(reward.model_fields) or "none"
        if item["type"] == "missing":
            message = f"kwargs.{key} is missing"
        elif item["type"] == "extra_forbidden":
            message = f"unknown key kwargs.{key}"
        else:
            message = f"kwargs.{key} = {shown_value(item['loc'], item['input'])}: {item['msg'].lower()}"
        message = masked_text(message, settings.kwargs)
        raise ValueError(f"{message}; {settings.function} takes: {fields}") from error


def check_name(settings: FunctionConfig) -> None:
    """Raise ValueError for a name that is unknown, and for a built-in reward of kind process."""
    if settings.function not in REWARDS:
        resolve_function(settings.function)
    elif isinstance(settings, ProcessRewardConfig):
        raise ValueError(
            f"kind = process: built-in reward {settings.function} scores no steps; remove `kind`, or name a "
            "user-supplied function"
        )


def resolve_function(function: str) -> str:
    """Return ``module:function`` of a user's reward. Raises ValueError if it is unknown or malformed."""
    module, _, name = function.partition(":")
    if module and name:
        return function
    names = registered(REWARD)
    if function not in names:
        raise ValueError(
            f"reward function {function!r}: expected one of {', '.join((*REWARDS, *names))}, or "
            "`module:function`, e.g. my_rewards:length"
        )
    return resolve_target(REWARD, function)


@dataclass(frozen=True, slots=True)
class StepScores:
    """Rewards of the steps of G completions; NaN: could not be scored."""

    rewards: tuple[np.ndarray, ...]  # G arrays float32 [S_i]
    char_ends: tuple[list[int], ...]  # G lists [S_i], the character at which the next step begins


class UserFunction:
    """A user's function, ``module:function`` or a name that a package registers, in the pool's processes.

    Raises:
        ValueError: the function is unknown, cannot be loaded, or has a signature that does not fit its kind.
    """

    def __init__(self, settings: FunctionConfig, pool: GraderPool) -> None:
        path = resolve_function(settings.function)
        self._path, self._kwargs, self._pool = path, settings.kwargs, pool
        self._steps = settings if isinstance(settings, ProcessRewardConfig) else None
        self._signature = pool.check(path)
        names = self._signature.names
        if self._steps and "steps" not in names:
            raise ValueError(
                f"reward function {path!r} of kind process: expected a parameter `steps`, the list of the "
                f"completion's steps; it has {', '.join(sorted(names)) or 'none'}"
            )
        self._takes_group = not self._steps and "completions" in names and "completion" not in names

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Required columns of the data: parameters without a default that nothing else fills."""
        return tuple(sorted(self._signature.required - OF_CALLS - set(self._kwargs)))

    @property
    def asked_columns(self) -> frozenset[str]:
        """Columns that the function receives if a row has them: all parameters that nothing else fills."""
        return self._signature.names - OF_CALLS - set(self._kwargs)

    def score(self, group: CompletionGroup) -> tuple[list[float | Failure], StepScores | None]:
        """Return a number or a Failure for each completion, and the rewards of its steps if any."""
        if self._steps:
            return self._score_steps(group, self._steps)
        size = len(group.completions)
        if self._takes_group:
            (result,) = self._pool.call(self._path, [self._keywords(group)], [size])
            return ([result] * size if isinstance(result, Failure) else result), None
        calls = [self._keywords(group, i) for i in range(size)]
        return self._pool.call(self._path, calls, together=self._signature.is_async), None

    def _score_steps(
        self, group: CompletionGroup, settings: ProcessRewardConfig
    ) -> tuple[list[float | Failure], StepScores]:
        split = [split_steps(text, settings.step_separator) for text in group.completions]
        sizes = [len(steps) for steps in split]
        calls = [
            self._keywords(group, i) | {"steps": [text for text, _ in steps]} for i, steps in enumerate(split)
        ]
        results = self._pool.call(self._path, calls, sizes, together=self._signature.is_async)
        values: list[float | Failure] = []
        rewards = []
        for result, size in zip(results, sizes, strict=True):
            scores = np.array([math.nan] * size if isinstance(result, Failure) else result, np.float64)
            scores = np.where(np.abs(scores) <= np.finfo(np.float32).max, scores, np.nan).astype(np.float32)
            rewards.append(scores)
            values.append(result if isinstance(result, Failure) else REDUCE[settings.reduce](scores))
        return values, StepScores(tuple(rewards), tuple([end for _, end in steps] for steps in split))

    def _keywords(self, group: CompletionGroup, index: int | None = None) -> dict[str, Any]:
        """Return the keywords of the call for sample ``index``; None: for the whole group. Columns and kwargs
        override descriptive names such as `source`.
        """

        def pick(values: Sequence[Any]) -> Any:
            return list(values) if index is None else values[index]

        described = {"source": group.source, "finish_reason": pick(group.finish_reasons)}
        if index is not None:
            described["group"] = list(group.completions)
        if "token_ids" in self._signature.names:
            ids = group.token_ids
            described["token_ids"] = [i.tolist() for i in ids] if index is None else ids[index].tolist()
        call = {name: value for name, value in described.items() if name in self._signature.names}
        call |= {"answer": group.gold, **group.columns, **self._kwargs}
        call["completions" if index is None else "completion"] = pick(group.completions)
        return call | ({"turns": pick(group.turns)} if any(group.turns) else {})
