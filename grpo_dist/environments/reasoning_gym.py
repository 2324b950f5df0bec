"""Problems of the package reasoning-gym, each scored by its own checker: as an environment, and as rows with
a reward (`grpo_dist.rewards.reasoning_gym`).

The answer is what stands in <answer></answer>, else in the last \\boxed{}, else the whole completion.

A problem belongs to the split `train`, or to any other, by its text alone: one in ten is held out, under any
settings and any seed. So no held-out problem is ever trained on.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from grpo_dist.environments.base import Environment, Problem, Step
from grpo_dist.runtime.processes import child_command

COLUMN = "reasoning_gym"  # the package's entry of a problem, and the settings of its scorer
_SIZE = 500  # problems of a split without `max_rows`
_HELD_OUT = 10  # one problem in ten
_SPARE = 5  # upper bound of the problems that are generated, relative to the mean number that a split needs


class ReasoningGym(Environment):
    """One problem of a data set; arguments are those of the data set, such as ``seed`` or ``max_terms``."""

    target: ClassVar[str]  # name of the data set

    def __init__(self, **settings: Any) -> None:
        """``settings`` are in the column of each problem, too."""

    def start(self, problem: Problem) -> str:
        self._kept = problem.columns[COLUMN]
        return problem.text

    def step(self, action: str) -> Step:
        """Score the answer: its reward is 0 to 1, and the episode ends."""
        return Step(reward=score_answer(action, self._kept), done=True)

    @classmethod
    def problems(cls, split: str, count: int | None, **kwargs: Any) -> Iterator[Mapping[str, Any]]:
        return rows(cls.target, split, count, kwargs)


def rows(
    name: str, split: str, count: int | None, settings: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield ``count`` different problems of a split, 500 for None: problem, answer, and the column `COLUMN`.

    A process of its own makes them, with PYTHONHASHSEED=0: some tasks depend on the order of sets of strings,
    and the same settings must give the same problems in every run and after a resume.

    Raises ValueError for an unknown data set, for settings that it refuses, and where it has fewer problems.
    """
    command = child_command(__name__, name, split, json.dumps(count), json.dumps(dict(settings)))
    environ = os.environ | {"PYTHONHASHSEED": "0"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                row = json.loads(line)
                if "refused" in row:
                    raise ValueError(row["refused"])
                yield row
            if child.wait():  # bounded: its output has ended, with it the process
                raise ValueError(f"reasoning_gym:{name}: making problems ended with code {child.returncode}")
        finally:
            child.kill()  # its reader may need no more


def main() -> None:
    """Write the rows that the arguments of this process ask for to its output, one JSON object a line."""
    name, split, count, settings = sys.argv[1:5]
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tasks print is no row
    try:
        for row in _made_rows(name, split, json.loads(count), json.loads(settings)):
            print(json.dumps(row), file=out, flush=True)
    except ValueError as error:
        print(json.dumps({"refused": str(error)}), file=out, flush=True)
    except BrokenPipeError:  # the reader needs no more
        os._exit(0)


def _made_rows(
    name: str, split: str, count: int | None, settings: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    if settings.get("seed", 0) is None:
        raise ValueError(f"reasoning_gym:{name}: kwargs.seed = null: expected a number, to repeat problems")
    wanted = count or _SIZE
    share = 1 if split == "train" else _HELD_OUT
    questions: set[str] = set()
    generated = 0
    # The data set is no larger than it must be: some tasks refuse large sizes.
    for size in (wanted * share * factor for factor in range(1, _SPARE + 1)):
        data_set = _data_set(name, json.dumps({**settings, "size": size}, sort_keys=True))
        for index in range(generated, size):
            random.seed(index)  # a few tasks draw from the module's own generator
            entry = data_set[index]
            question = entry["question"]
            if question in questions or is_held_out(question) == (split == "train"):
                continue
            questions.add(question)
            kept = {"task": name, "settings": dict(settings), "entry": _literal(entry, name)}
            yield {"problem": question, "answer": str(entry["answer"] or ""), COLUMN: kept}
            if len(questions) == wanted:
                return
        generated = size
    raise ValueError(
        f"reasoning_gym:{name}: {len(questions)} different problems for split {split} among {generated} made "
        f"with {dict(settings)}, expected {wanted}; lower `max_rows`, or choose settings with more problems"
    )


def _literal(entry: Mapping[str, Any], name: str) -> str:
    """Return an entry as a Python literal: unlike JSON it keeps tuples, sets and keys that are numbers."""
    text = repr(_plain(entry))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"reasoning_gym:{name}: an entry cannot be kept for its scorer ({error}); expected numbers, "
            "texts and containers of them; use another task"
        ) from error
    return text


def _plain(value: Any) -> Any:
    """Return ``value`` without the scalar types of numpy."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple, set) else value
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % _HELD_OUT == 0


def score_answer(completion: str, kept: Mapping[str, Any]) -> float:
    """Return the data set's own score of an answer, 0 to 1. ``kept``: the problem's `COLUMN`. Nothing is made
    again, so that the score belongs to the problem that was asked.

    An answer that the data set's scorer cannot read has score 0. Raises MemoryError, and the scorer's error
    where it fails with the package's own answer, too.
    """
    scorer = _data_set(kept["task"], json.dumps(kept["settings"], sort_keys=True))
    entry = ast.literal_eval(kept["entry"])
    try:
        return float(scorer.score_answer(_answer(completion), entry))
    except MemoryError:  # says nothing of the answer
        raise
    except Exception:  # any error: several scorers parse answers without checks
        scorer.score_answer(entry["answer"], entry)
        return 0.0


@lru_cache(maxsize=16)
def _data_set(name: str, settings: str) -> Any:
    if name not in DATASETS:
        raise ValueError(f"reasoning_gym:{name}: no such task; the package's GALLERY.md lists them")
    options = json.loads(settings)
    try:
        return reasoning_gym.create_dataset(name, **{"seed": 0, **options})
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"reasoning_gym:{name}: the package refuses the settings {options} ({error}); its GALLERY.md "
            "lists those of each task, and size follows from `max_rows`"
        ) from error


def _answer(completion: str) -> str:
    tagged = extract_answer(completion)
    if tagged is not None:
        return str(tagged)
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", completion)
    return boxed[-1].strip() if boxed else completion.strip()
