"""Data sets of the package reasoning-gym: made problems, each scored by its own checker.

The answer is what stands in <answer></answer>, else in the last \\boxed{}, else the whole action.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import reasoning_gym
from reasoning_gym.utils import extract_answer

from grpo_dist.environments.base import Environment, Problem, Step

_SIZE = 500  # problems of a split without `max_rows`


class ReasoningGym(Environment):
    """One problem of a data set; arguments are those of the data set, such as ``seed`` or ``max_terms``."""

    target: ClassVar[str]  # name of the data set

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def start(self, problem: Problem) -> str:
        self._row = problem.columns
        return problem.text

    def step(self, action: str) -> Step:
        """Score the answer: its reward is 0 to 1, and the episode ends."""
        made = _data_set(self.target, self._row["split"], self._row["size"], self._settings)
        entry = made[self._row["index"]]
        return Step(reward=float(made.score_answer(_answer(action), entry)), done=True)

    @classmethod
    def problems(cls, split: str, count: int | None, **kwargs: Any) -> Iterator[Mapping[str, Any]]:
        size = count or _SIZE
        made = _data_set(cls.target, split, size, kwargs)
        for index in range(size):
            entry = made[index]
            row = {"split": split, "size": size, "index": index}
            yield {"problem": entry["question"], "answer": str(entry["answer"] or ""), **row}


def _data_set(name: str, split: str, size: int, settings: Mapping[str, Any]) -> Any:
    """Make a split: another seed for each, so that no held-out problem is trained on but by chance."""
    seed = int(settings.get("seed", 0)) + (0 if split == "train" else zlib.crc32(split.encode()))
    return reasoning_gym.create_dataset(name, **{**settings, "seed": seed, "size": size})


def _answer(action: str) -> str:
    tagged = extract_answer(action)
    if tagged is not None:
        return tagged
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", action)
    return boxed[-1].strip() if boxed else action.strip()
