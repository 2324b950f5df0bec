"""Rewards by name, and their weighted sum. A reward of one's own is a function named as
``module:function``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import numpy as np

from grpo_dist.config import Rewards
from grpo_dist.rewards.format import think_answer_format
from grpo_dist.rewards.pool import Failure, GraderPool

logger = logging.getLogger(__name__)

_WARNINGS_PER_REWARD = 20  # distinct messages; a function that puts its input in them would never end


class Score(Protocol):
    """A built-in reward: G completions of a problem, its gold -> rewards (NaN: not scored) and outcomes."""

    def __call__(
        self, completions: Sequence[str], answer: str, pool: GraderPool
    ) -> tuple[list[float], list[str] | None]: ...


def _math(completions: Sequence[str], answer: str, pool: GraderPool) -> tuple[list[float], list[str] | None]:
    grades = pool.grade([(completion, answer) for completion in completions])
    return [grade.reward for grade in grades], [grade.outcome for grade in grades]


def _format(
    completions: Sequence[str], answer: str, pool: GraderPool
) -> tuple[list[float], list[str] | None]:
    return [think_answer_format(completion) for completion in completions], None


REWARDS: dict[str, Score] = {"math": _math, "format": _format}


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """``function``: ``math``, ``format`` or ``module:function``; ``kwargs`` are handed to a function of the
    user's.
    """

    name: str
    function: str
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scores:
    """Of G completions: ``rewards`` float32 [G], ``parts`` before weighting, ``outcomes`` of the math grader
    ("" without).
    """

    rewards: np.ndarray
    parts: dict[str, np.ndarray]
    outcomes: list[str]


def reward_specs(settings: Rewards) -> list[RewardSpec]:
    """The configuration's `rewards.functions`."""
    return [RewardSpec(r.name or r.function, r.function, r.weight, r.kwargs) for r in settings.functions]


def check_rewards(settings: Rewards) -> None:
    """Raises ValueError for a reward that cannot be used; loads the user's functions in a process of their
    own.
    """
    custom = [spec for spec in reward_specs(settings) if spec.function not in REWARDS]
    if custom:
        with GraderPool(1, code_paths=settings.code_paths) as pool:
            for spec in custom:
                check(spec, pool)


class Scorer:
    """Scores completions of one problem with every reward; several threads may call it at once.

    ``failures``: how often each custom reward failed, by message; each message is logged once.
    Raises ValueError, when made, for a reward that cannot be used, or two of one name.
    """

    def __init__(self, specs: Sequence[RewardSpec], pool: GraderPool) -> None:
        self._specs, self._pool = list(specs), pool
        self._lock = Lock()
        self.failures: dict[str, Counter[str]] = {}
        names = [spec.name for spec in self._specs]
        if len(set(names)) != len(names):
            raise ValueError(f"two rewards share a name: {names}; give each `name` once")
        for spec in self._specs:
            check(spec, pool)

    def score(self, completions: Sequence[str], answer: str, columns: Mapping[str, Any]) -> Scores:
        """The weighted sum is NaN where a part of non-zero weight is: what could not be scored is not 0.

        A function of the user's is called as ``function(completion=, answer=, **columns, **kwargs)`` with the
        names it takes; an exception, a timeout, None and NaN all mean "could not be scored".
        """
        parts: dict[str, np.ndarray] = {}
        outcomes = [""] * len(completions)
        for spec in self._specs:
            if spec.function in REWARDS:
                values, graded = REWARDS[spec.function](completions, answer, self._pool)
                outcomes = graded or outcomes
            else:
                values = self._custom(spec, completions, {"answer": answer, **columns})
            parts[spec.name] = np.array(values, dtype=np.float32)
        total = np.zeros(len(completions), dtype=np.float64)
        for spec in self._specs:
            if spec.weight:
                total += spec.weight * parts[spec.name]
        return Scores(total.astype(np.float32), parts, outcomes)

    def _custom(self, spec: RewardSpec, completions: Sequence[str], known: dict[str, Any]) -> list[float]:
        results = self._pool.call(
            spec.function, [{**known, **spec.kwargs, "completion": c} for c in completions]
        )
        for result in results:
            if isinstance(result, Failure):
                self._note(spec.name, result.detail)
        return [math.nan if isinstance(r, Failure) else r for r in results]

    def _note(self, name: str, detail: str) -> None:
        with self._lock:
            seen = self.failures.setdefault(name, Counter())
            new = detail not in seen
            if new and len(seen) >= _WARNINGS_PER_REWARD:
                detail, new = "further messages", False
            seen[detail] += 1
        if new:
            logger.warning("reward %s: %s; such samples count as not scored", name, detail)


def check(spec: RewardSpec, pool: GraderPool) -> None:
    """Raises ValueError for an unknown name, or a function that cannot be loaded."""
    if spec.function in REWARDS:
        return
    module, _, name = spec.function.partition(":")
    if not module or not name:
        raise ValueError(
            f"reward function {spec.function!r}: expected {', '.join(REWARDS)} or `module:function`, e.g. "
            f"my_rewards:length"
        )
    pool.check(spec.function)
