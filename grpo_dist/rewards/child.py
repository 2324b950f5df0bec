"""What runs in a grader process: ``python -m grpo_dist.rewards.child MEMORY_MB``.

Requests come as pickles on standard input, replies go as JSON lines to the original standard output; whatever graded code
prints goes nowhere. The process ends when its input does, and limits its own memory and processor time, so that it dies
soon even if its parent was killed while it was busy.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import pickle
import resource
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from grpo_dist.rewards.math import grade

    grade("\\boxed{1}", "2")  # imports the parser and builds its tables
    _limit_memory(int(sys.argv[1]))
    print(json.dumps("ready"), file=replies)
    while True:
        try:
            kind, seconds, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _limit_processor_time(seconds)
        print(json.dumps(_answer(kind, arguments)), file=replies)


def _answer(kind: str, arguments: tuple[Any, ...]) -> list[Any]:
    """["ok", result] or ["failed", reason]."""
    try:
        return ["ok", _KINDS[kind](*arguments)]
    except MemoryError:
        return ["failed", "out of memory"]
    except BaseException as error:  # also SystemExit and the like from graded code: it must not end the process
        return ["failed", f"{type(error).__name__}: {error}"[:500]]


def _grade(completion: str, answer: str) -> list[str]:
    from grpo_dist.rewards.math import grade

    result = grade(completion, answer)
    return [result.outcome, result.detail]


def _call(path: str, keywords: dict[str, Any]) -> float | None:
    """The function's value; None where it gives None or NaN."""
    function, accepted = load(path)
    value = function(**{k: v for k, v in keywords.items() if accepted is None or k in accepted})
    return None if value is None or math.isnan(float(value)) else float(value)


def _check(path: str) -> None:
    load(path)


@lru_cache
def load(path: str) -> tuple[Callable[..., Any], frozenset[str] | None]:
    """The function at ``module:function`` and the keywords it takes; None: all. Raises ValueError saying what is wrong."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"module `{module_name}` cannot be imported ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"module `{module_name}` has no function `{name}`")
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function, None
    return function, frozenset(p.name for p in parameters)


def _limit_memory(megabytes: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = used + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_processor_time(seconds: float) -> None:
    """The parent kills by the clock; this only serves when the parent is no more."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime + 2 * seconds) + 1, hard))


_KINDS: dict[str, Callable[..., Any]] = {"grade": _grade, "call": _call, "check": _check}

if __name__ == "__main__":
    main()
