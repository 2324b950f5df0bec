"""The program in an episode's process: its environment instance and tools.

The parent process that episodes are forked from has imported the environment. Requests and replies are JSON.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from grpo_dist.environments.base import Environment, Problem, Step
from grpo_dist.environments.builtin import python
from grpo_dist.environments.episode import Call, join_text
from grpo_dist.environments.registry import load_environment
from grpo_dist.environments.tools import BadCall, as_text, typed_tools

_REASON = 2000  # maximum characters of an error shown to the policy
_ROWS = 500  # maximum problems per reply


class Program:
    """One episode of an environment. A tool's exception becomes the call's result; any other exception is an
    environment failure. ``kwargs``: the environment's arguments.
    """

    def __init__(self, environment: str | type[Environment], kwargs: Mapping[str, Any]) -> None:
        self._class = load_environment(environment) if isinstance(environment, str) else environment
        self._kwargs = kwargs
        self._environment: Environment | None = None
        self._rows: Iterator[Mapping[str, Any]] | None = None
        self._tools = typed_tools(self._class.tools)

    @staticmethod
    def preload(environment: str, kwargs: Mapping[str, Any]) -> None:
        """Load what all episodes share, in the process that they are forked from."""
        load_environment(environment).preload(**kwargs)

    async def handle(self, kind: str, payload: Any) -> Any:
        """Answer a request: describe, start, problems, call, step or close."""
        return await getattr(self, f"_{kind}")(**payload)

    async def _describe(self) -> dict[str, Any]:
        """Describe the environment for preparation and for the handling of failures.

        ``asks``: it overrides `start`. ``stateless``: an episode can continue in a new process.
        ``batched``: it answers many episodes at once.
        """
        asks, batched = self._class.start is not Environment.start, self._overrides("step_batch")
        return {
            "tools": [tool.schema for tool in self._tools.values()],
            "stop": self._stop(),
            "sandboxed": any(tool.function is python for tool in self._tools.values()),
            "asks": asks,
            "stateless": not (asks or batched or any(tool.is_method for tool in self._tools.values()))
            and self._class.step is Environment.step,
            "batched": batched,
            "has_problems": self._overrides("problems"),
        }

    def _stop(self) -> list[str]:
        stop = self._class.stop
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"`stop` = {stop!r}; expected a list of texts, such as ['</search>']")
        return list(stop)

    def _overrides(self, class_method: str) -> bool:
        defined, general = getattr(self._class, class_method), getattr(Environment, class_method)
        return getattr(defined, "__func__", defined) is not general.__func__

    async def _start(self, problem: Mapping[str, Any]) -> Any:
        """Begin an episode and return its prompt, as messages or text."""
        if self._environment is not None:
            await self._close()
        self._environment = self._class(**self._kwargs)
        question = await awaited(self._environment.start(Problem(**problem)))
        return _observation(question, "start")

    async def _problems(self, split: str, count: int | None) -> list[dict[str, Any]]:
        """Return the next rows, at most 500; [] at the end. Called repeatedly with the same arguments."""
        if self._rows is None:
            self._rows = iter(self._class.problems(split, count, **self._kwargs))
        return [dict(row) for row in islice(self._rows, _ROWS)]

    async def _call(
        self, problem: Mapping[str, Any], begin: bool, name: str, arguments: str, raw: bool
    ) -> dict[str, Any]:
        """Call a tool. Returns its result and outcome, or the code that the sandbox is to run."""
        environment = await self.begin(problem, begin)
        tool = self._tools.get(name)
        if tool is None:
            there = ", ".join(self._tools) or "none"
            return _result(f"there is no tool `{name}`; there are: {there}", "unknown")
        try:
            values = tool.arguments(Call(name, arguments, raw))
        except BadCall as error:
            return _result(str(error), "malformed")
        if tool.function is python:
            return {"code": values["code"]}
        began, bound = time.monotonic(), (environment,) if tool.is_method else ()
        try:
            result, outcome = as_text(await awaited(tool.function(*bound, **values))), "ok"
        except MemoryError:
            result, outcome = "out of memory", "memory"
        except Exception as error:
            result, outcome = f"{type(error).__name__}: {error}"[:_REASON], "error"
        return _result(result, outcome, time.monotonic() - began)

    async def _step(self, problem: Mapping[str, Any], begin: bool, action: str) -> dict[str, Any]:
        environment = await self.begin(problem, begin)
        return check_step(await awaited(environment.step(action)))

    async def _close(self) -> None:
        if self._environment is not None:
            await awaited(self._environment.close())

    async def begin(self, problem: Mapping[str, Any], begin: bool) -> Environment:
        """Return the episode's environment. ``begin``: this is the first request of the episode."""
        if self._environment is None:
            if not begin and not (await self._describe())["stateless"]:
                raise RuntimeError("the environment's process was lost, and its state with it")
            await self._start(problem)
        assert self._environment is not None
        return self._environment


def check_step(step: Any) -> dict[str, Any]:
    """Return the reply for a `Step`. Raises TypeError or ValueError for any other object."""
    if not isinstance(step, Step):
        raise TypeError(f"step returned a {type(step).__name__}, expected a Step")
    if step.observation is None and not step.done:
        raise ValueError("step returned neither an observation nor done=True")
    reward = None if step.reward is None else float(step.reward)
    observation = "" if step.observation is None else _observation(step.observation, "step")
    return {"observation": observation, "reward": reward, "done": bool(step.done)}


def _result(text: str, outcome: str, seconds: float = 0.0) -> dict[str, Any]:
    return {"result": text, "outcome": outcome, "seconds": seconds}


def _observation(value: Any, method: str) -> Any:
    """Return an observation: text, or messages with role and content, which is text."""
    if isinstance(value, str):
        return value
    try:
        messages = [{**message, "content": join_text(message["content"])} for message in map(dict, value)]
    except (TypeError, ValueError, KeyError):
        messages = []
    if not messages or any(not isinstance(message.get("role"), str) for message in messages):
        raise TypeError(
            f"{method} returned {str(value)[:100]!r}; expected text, or messages of role and content, which "
            "is text or a list of text parts"
        )
    return messages


async def awaited(value: Any) -> Any:
    """Return ``value``, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value
