"""What runs in a grader process, which `pool` starts with the arguments MEMORY_MB LIFELINE OWN.

Requests come as pickles on standard input, replies go as JSON lines to the original standard output. Code
that is graded finds both closed: what it prints goes nowhere, and what it reads is empty. A reply carries the
random number of its request, so that a line written to its descriptor by other code is none. A process that
is forked from this one has neither descriptor.

OWN is 1 in a process for the package's own graders, which never runs code of the user's, and else 0.
"""

from __future__ import annotations

import fcntl
import importlib
import inspect
import json
import math
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from grpo_dist.rewards.guardian import fork_guarded


def main() -> None:
    memory_mb, lifeline, own = (int(argument) for argument in sys.argv[1:4])
    fork_guarded(lifeline)
    _die_with_parent(lifeline)
    requests = os.fdopen(os.dup(0), "rb", closefd=False)
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.register_at_fork(after_in_child=partial(_close, (requests.fileno(), replies, lifeline)))
    if own:
        from grpo_dist.rewards.math import grade

        grade("\\boxed{1}", "2")  # imports the parser and builds its tables
    _limit_memory(memory_mb)
    _reply(replies, "ready")
    while True:
        try:
            number, kind, arguments = pickle.load(requests)
        except EOFError:
            return
        _reply(replies, [number, *_answer(kind, pickle.loads(arguments), memory_mb)])


def _reply(descriptor: int, value: Any) -> None:
    rest = memoryview(json.dumps(value).encode() + b"\n")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def _answer(kind: str, arguments: tuple[Any, ...], memory_mb: int) -> list[Any]:
    """["ok", result], ["failed", reason] or ["memory", reason]: then this process should be replaced."""
    try:
        if kind == "load":
            # Importing is not scoring: what a module takes, which may be much, is not charged to its answers.
            _limit_memory(None)
            try:
                load(*arguments)
            finally:
                _limit_memory(memory_mb)
            return ["ok", None]
        return ["ok", _KINDS[kind](*arguments)]
    except MemoryError:
        return [
            "memory",
            f"out of memory: more than {memory_mb} MB beyond what the process holds when started",
        ]
    except (
        BaseException
    ) as error:  # also SystemExit and the like from graded code: it must not end the process
        return ["failed", f"{type(error).__name__}: {error}"[:500]]


def _grade(completion: str, answer: str, accept_arithmetic: bool) -> list[str]:
    from grpo_dist.rewards.math import grade

    result = grade(completion, answer, accept_arithmetic=accept_arithmetic)
    return [result.outcome, result.detail]


def _find(completion: str) -> str | None:
    from grpo_dist.rewards.math import answer_found

    return answer_found(completion)


def _call(path: str, keywords: dict[str, Any]) -> float | None:
    """The function's value; None where it gives None or NaN, its way to say "cannot be scored"."""
    function, accepted = load(path)
    value = function(**{k: v for k, v in keywords.items() if accepted is None or k in accepted})
    if value is None:
        return None
    number = float(value)
    if math.isinf(number):
        raise ValueError(
            f"{path} returned {number}; expected a finite number, or None for what cannot be scored"
        )
    return None if math.isnan(number) else number


_KINDS: dict[str, Callable[..., Any]] = {"grade": _grade, "find": _find, "call": _call}


@lru_cache
def load(path: str) -> tuple[Callable[..., Any], frozenset[str] | None]:
    """The function at ``module:function`` and the keywords it takes; None: all.

    Raises ValueError saying what is wrong.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"module `{module_name}` cannot be imported ({type(error).__name__}: {error})"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"module `{module_name}` has no function `{name}`")
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function, None
    return function, frozenset(p.name for p in parameters)


def _limit_memory(megabytes: int | None) -> None:
    """Address space: what is in use now plus ``megabytes``; None: as far as the system allows."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard
    if megabytes is not None:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + megabytes * 2**20
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _die_with_parent(lifeline: int) -> None:
    """SIGKILL for this process group when the parent is gone.

    The kernel sends it when the other end of this pipe closes, so it also ends a process that is busy in C
    and never comes back to Python, as in 9**9**9. (Death signals of prctl come when the *thread* that
    started a child ends.)
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
