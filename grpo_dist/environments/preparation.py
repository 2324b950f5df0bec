"""Query environments, each in its own process, for what a run needs before it starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.base import Problem
from grpo_dist.environments.records import without_surrogates
from grpo_dist.environments.runner import Host, host_of
from grpo_dist.environments.sandbox.failure import ProcessFailure

T = TypeVar("T")
_EPISODE = "preparation"


@dataclass(frozen=True, slots=True)
class Description:
    """An environment as its class describes it.

    Attributes:
        tools: JSON schemas.
        sandboxed: whether it has the tool `python`.
        asks: whether it has a `start` of its own.
        stateless: it has neither `start` nor `step` of its own, so an episode can continue in a new process.
        batched: it has `step_batch`.
        has_problems: whether it brings its own problems.
    """

    tools: tuple[Mapping[str, Any], ...]
    sandboxed: bool
    asks: bool
    stateless: bool
    batched: bool
    has_problems: bool


class StartFailed(ValueError):
    """``start`` failed for the problem of this index."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index, self.reason = index, reason


@dataclass(frozen=True, slots=True)
class EnvironmentProbe:
    """One environment of a run. Every method starts processes and ends them, and raises ValueError for an
    environment that cannot be used.
    """

    name: str
    kwargs: Mapping[str, Any]
    settings: EnvironmentsConfig

    def describe(self) -> Description:
        async def ask(host: Host) -> Description:
            return Description(**await self._ask(host, "describe", {}))

        return self._run(ask)

    def questions(self, problems: Sequence[Problem]) -> tuple[Description, list[Any]]:
        """Return the description, and what `start` asks for each problem: text or messages.

        An environment without a `start` of its own is only asked for the first one. Raises StartFailed.
        """

        async def ask(host: Host) -> tuple[Description, list[Any]]:
            described = Description(**await self._ask(host, "describe", {}))
            asked: list[Any] = [problem.text for problem in problems]
            for index, problem in enumerate(problems if described.asks else problems[:1]):
                try:
                    asked[index] = await self._ask(host, "start", {"problem": asdict(problem)})
                except ValueError as error:
                    raise StartFailed(index, str(error)) from error
            if described.asks:
                await self._ask(host, "close", {})  # of the last problem; each `start` closes the one before
            return described, asked

        return self._run(ask)

    def own_problems(self, split: str, count: int | None) -> list[dict[str, Any]]:
        """Return the rows that the environment brings; at most ``count``."""

        async def ask(host: Host) -> list[dict[str, Any]]:
            if not Description(**await self._ask(host, "describe", {})).has_problems:
                raise ValueError(
                    f"environment {self.name} brings no problems of its own; set the source's `path`, or "
                    "give the environment a class method `problems`"
                )
            rows: list[dict[str, Any]] = []
            while count is None or len(rows) < count:
                more = await self._ask(host, "problems", {"split": split, "count": count})
                if not more:
                    break
                rows += more
            return rows[:count]

        return self._run(ask)

    def _run(self, ask: Callable[[Host], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with self._host() as host:
                return await ask(host)

        return asyncio.run(run())

    @asynccontextmanager
    async def _host(self) -> AsyncIterator[Host]:
        host = host_of(self.name, self.kwargs, self.settings)
        try:
            yield host
        finally:
            await host.close()

    async def _ask(self, host: Host, kind: str, payload: Mapping[str, Any]) -> Any:
        try:
            answer = await host.ask(_EPISODE, kind, payload, timeout_s=self.settings.timeout_s)
        except ProcessFailure as failure:
            what = "" if kind == "describe" else f" {kind}:"
            reason = str(failure).removeprefix("ValueError: ")
            outcome = "" if failure.outcome == "error" else f" {failure.outcome}:"
            raise ValueError(f"environment {self.name}:{what}{outcome} {reason}") from failure
        return without_surrogates(answer)
