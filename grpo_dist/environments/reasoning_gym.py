"""Problems of the package reasoning-gym, scored by the package: as an environment, and as rows with a reward
(`grpo_dist.rewards.reasoning_gym`).

The answer is the text in <answer></answer>, else in the last \\boxed{}, else the whole completion.

A problem's text alone decides whether it belongs to the split `train`: one in ten is held out, for any
settings and seed. So no held-out problem is ever trained on.
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

COLUMN = "reasoning_gym"  # the package's entry of a problem, with the scorer's settings
_SIZE = 500  # problems per split without `max_rows`
_HELD_OUT = 10  # one problem in ten
_SPARE = 5  # generates at most this multiple of the expected number of problems


class ReasoningGym(Environment):
    """One problem of a data set. Arguments are the data set's, such as ``seed`` or ``max_terms``."""

    target: ClassVar[str]  # name of the data set

    def __init__(self, **settings: Any) -> None:
        """Ignore ``settings``: each problem's column has them."""

    def start(self, problem: Problem) -> str:
        self._column = problem.columns[COLUMN]
        return problem.text

    def step(self, action: str) -> Step:
        """Score the answer with a reward of 0 to 1, and end the episode."""
        return Step(reward=score_answer(action, self._column), done=True)

    @classmethod
    def problems(cls, split: str, count: int | None, **kwargs: Any) -> Iterator[Mapping[str, Any]]:
        return rows(cls.target, split, count, kwargs)


def rows(
    name: str, split: str, count: int | None, settings: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield ``count`` different problems of a split, 500 for None: problem, answer, and the column `COLUMN`.

    A child process generates them with PYTHONHASHSEED=0: some tasks depend on the order of sets of strings,
    and the same settings must give the same problems in every run and after a resume.

    Raises ValueError for an unknown data set, refused settings, or too few problems.
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
            if child.wait():  # bounded: its output has ended
                raise ValueError(f"reasoning_gym:{name}: generating rows failed with code {child.returncode}")
        finally:
            child.kill()  # the caller may stop early


def main() -> None:
    """Write the rows that the command line requests to stdout, one JSON object per line."""
    name, split, count, settings = sys.argv[1:5]
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps the tasks' prints out of the rows
    try:
        for row in _made_rows(name, split, json.loads(count), json.loads(settings)):
            print(json.dumps(row), file=out, flush=True)
    except ValueError as error:
        print(json.dumps({"refused": str(error)}), file=out, flush=True)
    except BrokenPipeError:  # the reader stopped early
        os._exit(0)


def _made_rows(
    name: str, split: str, count: int | None, settings: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    if settings.get("seed", 0) is None:
        raise ValueError(f"reasoning_gym:{name}: kwargs.seed = null: expected a number, to repeat problems")
    target = count or _SIZE
    share = 1 if split == "train" else _HELD_OUT
    questions: set[str] = set()
    generated = 0
    # Keeps the data set small, because some tasks refuse large sizes.
    for size in (target * share * factor for factor in range(1, _SPARE + 1)):
        data_set = _data_set(name, json.dumps({**settings, "size": size}, sort_keys=True))
        for index in range(generated, size):
            random.seed(index)  # a few tasks use the global random generator
            entry = data_set[index]
            question = entry["question"]
            if question in questions or is_held_out(question) == (split == "train"):
                continue
            questions.add(question)
            column = {"task": name, "settings": dict(settings), "entry": _literal(entry, name)}
            yield {"problem": question, "answer": str(entry["answer"] or ""), COLUMN: column}
            if len(questions) == target:
                return
        generated = size
    raise ValueError(
        f"reasoning_gym:{name}: {len(questions)} different problems for split {split} among {generated} made "
        f"with {dict(settings)}, expected {target}; lower `max_rows`, or choose settings with more problems"
    )


def _literal(entry: Mapping[str, Any], name: str) -> str:
    """Return an entry as a Python literal: unlike JSON it keeps tuples, sets and keys that are numbers."""
    text = repr(_plain(entry))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"reasoning_gym:{name}: an entry cannot be stored for its scorer ({error}); expected numbers, "
            "texts and containers of them; use another task"
        ) from error
    return text


def _plain(value: Any) -> Any:
    """Return ``value`` with numpy scalars converted to Python's."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple, set) else value
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % _HELD_OUT == 0


def score_answer(completion: str, kept: Mapping[str, Any]) -> float:
    """Return the data set's score of an answer, 0 to 1. ``kept``: the problem's `COLUMN`. The problem is not
    regenerated, so the score belongs to the problem in the prompt.

    An answer that the scorer cannot parse scores 0. Raises MemoryError, and the scorer's error if it fails on
    the package's reference answer, too.
    """
    scorer = _data_set(kept["task"], json.dumps(kept["settings"], sort_keys=True))
    entry = ast.literal_eval(kept["entry"])
    try:
        return float(scorer.score_answer(_answer(completion), entry))
    except MemoryError:  # not the answer's fault
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
            "lists each task's settings, and size follows from `max_rows`"
        ) from error


def _answer(completion: str) -> str:
    tagged = extract_answer(completion)
    if tagged is not None:
        return str(tagged)
    boxed = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", completion)
    return boxed[-1].strip() if boxed else completion.strip()
