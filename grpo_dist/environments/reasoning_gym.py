"""Problems of the package reasoning-gym, each scored by its own checker: as an environment, and as rows with
a reward (`grpo_dist.rewards.reasoning_gym`).

The answer is what stands in <answer></answer>, else in the last \\boxed{}, else the whole completion.

A problem belongs to the split `train`, or to any other, by its text alone: one in ten is held out, whatever
the settings and the seed that made it. So no held-out problem is ever trained on.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import reasoning_gym
from reasoning_gym.utils import extract_answer

from grpo_dist.environments.base import Environment, Problem, Step

COLUMN = "reasoning_gym"  # how a problem is made again, to be scored
_SIZE = 500  # problems of a split without `max_rows`
_HELD_OUT = 10  # one in so many
_SPARE = 5  # so many times as many problems are made as a split needs on average


class ReasoningGym(Environment):
    """One problem of a data set; arguments are those of the data set, such as ``seed`` or ``max_terms``."""

    target: ClassVar[str]  # name of the data set

    def __init__(self, **settings: Any) -> None:
        """``settings`` are in the column of each problem, too."""

    def start(self, problem: Problem) -> str:
        self._made = problem.columns[COLUMN]
        return problem.text

    def step(self, action: str) -> Step:
        """Score the answer: its reward is 0 to 1, and the episode ends."""
        return Step(reward=score_answer(action, self._made), done=True)

    @classmethod
    def problems(cls, split: str, count: int | None, **kwargs: Any) -> Iterator[Mapping[str, Any]]:
        return rows(cls.target, split, count, kwargs)


def rows(
    name: str, split: str, count: int | None, settings: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield ``count`` different problems of a split, 500 for None: problem, answer, and the column `COLUMN`.

    Raises ValueError for an unknown data set, for settings that it refuses, and where it has fewer problems.
    """
    wanted = count or _SIZE
    size = wanted * _SPARE * (1 if split == "train" else _HELD_OUT)
    made = _data_set(name, json.dumps({**settings, "size": size}, sort_keys=True))
    found: set[str] = set()
    for index in range(size):
        entry = made[index]
        question = entry["question"]
        if question in found or is_held_out(question) == (split == "train"):
            continue
        found.add(question)
        how = {"task": name, "settings": {**settings, "size": size}, "index": index}
        yield {"problem": question, "answer": str(entry["answer"] or ""), COLUMN: how}
        if len(found) == wanted:
            return
    raise ValueError(
        f"reasoning_gym:{name}: {len(found)} different problems for split {split} among {size} made with "
        f"{dict(settings)}, expected {wanted}; lower `max_rows`, or choose settings with more problems"
    )


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % _HELD_OUT == 0


def score_answer(completion: str, made: Mapping[str, Any]) -> float:
    """Return the data set's own score of an answer, 0 to 1. ``made``: the problem's `COLUMN`."""
    data_set = _data_set(made["task"], json.dumps(made["settings"], sort_keys=True))
    return float(data_set.score_answer(_answer(completion), data_set[made["index"]]))


@lru_cache(maxsize=16)
def _data_set(name: str, settings: str) -> Any:
    known = json.loads(settings)
    try:
        return reasoning_gym.create_dataset(name, **{"seed": 0, **known})
    except (ValueError, TypeError, AssertionError) as error:
        own = {key: value for key, value in known.items() if key != "size"}
        raise ValueError(
            f"reasoning_gym:{name}: no such task, or not with the settings {own} ({error}); the package's "
            "GALLERY.md lists tasks and their settings"
        ) from error


def _answer(completion: str) -> str:
    tagged = extract_answer(completion)
    if tagged is not None:
        return str(tagged)
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", completion)
    return boxed[-1].strip() if boxed else completion.strip()
