"""Main program of a grader process. `pool` starts it with the arguments MEMORY_MB LIFELINE USER_CODE.

Requests arrive as pickles on standard input; replies leave as JSON lines on the original standard output.
Both are redirected to /dev/null for graded code, so its prints are discarded and its reads are empty. A reply
repeats the random number of its request, so no line of other code counts as a reply, and ends with the CPU
seconds of this process. A forked process inherits neither descriptor.

USER_CODE is 0 in a process for built-in graders, which never runs user code, and 1 otherwise.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial
from typing import Any

from grpo_dist.errors import raised
from grpo_dist.runtime.processes import die_with, fork_guarded, limit_address_space, pause_garbage_collection

IMPORTING = "importing"  # sent before and after an import that an answer needs
_CANCELLED_S = 1.0  # seconds for cancelled calls to end


def main() -> None:
    memory_mb, lifeline, runs_user_code = (int(argument) for argument in sys.argv[1:4])
    fork_guarded(lifeline)
    die_with(lifeline)
    requests = os.fdopen(os.dup(0), "rb", closefd=False)
    replies = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.register_at_fork(after_in_child=partial(_close, (requests.fileno(), replies, lifeline)))
    if not runs_user_code:
        with pause_garbage_collection():
            from grpo_dist.rewards import math as grader  # not at the top: user code starts fast

            grader.importing = partial(_importing, replies, memory_mb)
            grader.grade("\\boxed{1}", "2")  # warm-up: builds the parser's tables
    limit_address_space(memory_mb)
    _reply(replies, ["ready", os.getpid(), time.process_time()])
    while True:
        try:
            number, kind, arguments = pickle.load(requests)
        except EOFError:
            return
        answer = _answer(kind, pickle.loads(arguments), memory_mb)
        _reply(replies, [number, *answer, time.process_time()])


def _reply(descriptor: int, value: Any) -> None:
    rest = memoryview(json.dumps(value).encode() + b"\n")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def _importing(replies: int, memory_mb: int) -> Iterator[None]:
    """Notify the pool before and after an import."""
    _reply(replies, IMPORTING)
    with _unlimited(memory_mb):
        yield
    _reply(replies, IMPORTING)


@contextmanager
def _unlimited(memory_mb: int) -> Iterator[None]:
    """Lift the memory limit during an import, whose memory is not charged to the answers."""
    limit_address_space(None)
    try:
        yield
    finally:
        limit_address_space(memory_mb)


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


def _answer(kind: str, arguments: tuple[Any, ...], memory_mb: int) -> list[Any]:
    """Run one request.

    Returns ["ok", result], ["failed", reason], or ["memory", reason] to ask for a restart.
    """
    try:
        if kind == "load":
            with _unlimited(memory_mb):
                function, accepted = load(*arguments)
            parameters = {
                name: parameter
                for name, parameter in inspect.signature(function).parameters.items()
                if accepted is None or name in accepted
            }
            required = [name for name, parameter in parameters.items() if _is_required(parameter)]
            is_async = inspect.iscoroutinefunction(function)
            return ["ok", {"names": [*parameters], "required": required, "is_async": is_async}]
        return ["ok", _KINDS[kind](*arguments)]
    except MemoryError:
        return ["memory", f"out of memory: more than {memory_mb} MB above the process's size at start"]
    except BaseException as error:  # includes SystemExit: graded code must not end the process
        return ["failed", raised(error)]


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variadic


def _grade(completion: str, answer: str, accept_arithmetic: bool, require_box: bool) -> list[str]:
    from grpo_dist.rewards.math import grade  # as in `main`

    result = grade(completion, answer, accept_arithmetic=accept_arithmetic, require_box=require_box)
    return [result.outcome, result.detail]


def _extract(completion: str, require_box: bool) -> str | None:
    from grpo_dist.rewards.math import extract_answer  # as in `main`

    return extract_answer(completion, require_box=require_box)


def _call(
    path: str, calls: list[dict[str, Any]], limits: list[float], sizes: list[int | None]
) -> list[list[Any]]:
    """Call the user's function with each of ``calls``.

    Awaits the calls of an asynchronous function concurrently, each for ``limits`` seconds; the pool bounds
    other functions. Returns ["ok", number], ["failed", reason] or ["timeout", reason] per call; with a size,
    a list of that many numbers. A number is None where the function returned None or NaN: "cannot be scored".
    """
    function, accepted = load(path)
    filtered = [{k: v for k, v in call.items() if accepted is None or k in accepted} for call in calls]
    if inspect.iscoroutinefunction(function):
        return _runner().run(
            _await_all(path, [partial(function, **call) for call in filtered], limits, sizes)
        )
    replies = []
    for call, size in zip(filtered, sizes, strict=True):
        value = function(**call)
        if inspect.isawaitable(value):
            value = _runner().run(_wait(value))
        replies.append(["ok", _checked(path, value, size)])
    return replies


async def _await_all(
    path: str, calls: list[Callable[[], Awaitable[Any]]], limits: list[float], sizes: list[int | None]
) -> list[list[Any]]:
    late: list[asyncio.Future[Any]] = []  # past their deadline

    async def reply(call: Callable[[], Awaitable[Any]], limit_s: float, size: int | None) -> list[Any]:
        task = asyncio.ensure_future(_wait(call()))
        await asyncio.wait([task], timeout=limit_s)
        if not task.done():
            task.cancel()
            late.append(task)
            return ["timeout", f"no result within {limit_s:g} s"]
        try:
            return ["ok", _checked(path, task.result(), size)]  # bounded: it is done
        except BaseException as error:  # as in `_answer`, and a cancelled task
            return ["failed", raised(error)]

    replies = await asyncio.gather(*map(reply, calls, limits, sizes))
    if late:
        await asyncio.wait(late, timeout=_CANCELLED_S)
    return replies


@cache
def _runner() -> asyncio.Runner:
    """Return the event loop of this process: a client stored in a user's module belongs to one loop."""
    return asyncio.Runner()


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


def _checked(path: str, values: Any, size: int | None) -> Any:
    """Return ``values`` as a number, or as ``size`` numbers: for a group, or for the steps of a completion.

    Raises ValueError for other values.
    """
    if size is None:
        return _number(path, values)
    try:
        if isinstance(values, str | bytes | Mapping | Set):
            raise TypeError("not in the order of the completions")
        numbers = list(values)
    except TypeError as error:
        raise ValueError(f"{path} returned {_describe(values)}; expected a list of {size} numbers") from error
    if len(numbers) != size:
        raise ValueError(f"{path} returned {len(numbers)} numbers; expected {size}")
    return [_number(path, value) for value in numbers]


def _number(path: str, value: Any) -> float | None:
    """Return a number or boolean as float; None for None and NaN. Raises ValueError for anything else."""
    if value is None:
        return None
    try:
        number = math.inf if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.inf
    if math.isinf(number):
        raise ValueError(
            f"{path} returned {_describe(value)}; expected a finite number, or None if it cannot be scored"
        )
    return None if math.isnan(number) else number


def _describe(value: Any) -> str:
    """Describe what a function returned: None, inf, the text 'yes', a dict."""
    if value is None or isinstance(value, float):
        return str(value)
    return f"the text {value[:80]!r}" if isinstance(value, str) else f"a {type(value).__name__}"


_KINDS: dict[str, Callable[..., Any]] = {
    "grade": _grade,
    "extract": _extract,
    "call": _call,
}


@lru_cache
def load(path: str) -> tuple[Callable[..., Any], frozenset[str] | None]:
    """Import ``module:function``. Returns it with the keywords it accepts, None for any.

    Raises ValueError when the module or the function cannot be loaded.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"module `{module_name}` cannot be imported ({raised(error)})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"module `{module_name}` has no function `{name}`")
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function, None
    return function, frozenset(p.name for p in parameters)
