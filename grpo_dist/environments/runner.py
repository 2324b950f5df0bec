"""Runs the environments and tools of many episodes for one worker.

    action with calls      each tool in the environment's process; `python` in the sandbox
    action without calls   the environment's step

User code runs in one process per episode, or with `step_batch` in one shared process. Built-in environments
hold no user code and run in this process.

`EnvironmentProbe` queries environments before a run, each in a separate process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.config.environments import AGENT
from grpo_dist.config.secrets import masked_text
from grpo_dist.environments.base import Environment, Problem, Step
from grpo_dist.environments.batches import BatchHost
from grpo_dist.environments.episode import Action, Call, Observed, replace_surrogates
from grpo_dist.environments.program import Program
from grpo_dist.environments.registry import BUILTIN
from grpo_dist.environments.sandbox.host import ProcessFailure, ProcessHost
from grpo_dist.environments.sandbox.isolation import Limits
from grpo_dist.environments.sandbox.python import PythonSandbox
from grpo_dist.errors import UserError, raised
from grpo_dist.types import Task, ToolCall

if TYPE_CHECKING:
    from grpo_dist.environments.agent import Agents

_CLOSE_S = 5.0  # deadline of an environment's `close`
_REPLY_KB = 2**20  # of trusted code: its memory limit is the one that counts, for problems and batches, too
_REASON = 1000  # maximum characters of a failure


class UnknownEpisode(Exception):
    """A mid-episode action reached a worker that does not have the episode."""


class Host(Protocol):
    """Where the programs of one environment run, one per episode."""

    async def begin(self, episode: str) -> object: ...
    async def ask(self, episode: str, kind: str, payload: Any, *, timeout_s: float) -> Any: ...
    async def end(self, episode: str) -> None: ...
    async def close(self) -> None: ...


class _LocalHost:
    """Runs built-in environments in this process."""

    def __init__(self, program: partial[Program]) -> None:
        self._program = program
        self._live: dict[str, Program] = {}

    async def begin(self, episode: str) -> None:
        """Do nothing: there is no process to start."""

    async def ask(self, episode: str, kind: str, payload: Any, *, timeout_s: float) -> Any:
        if episode not in self._live:
            self._live[episode] = self._program()
        return await self._live[episode].handle(kind, payload)

    async def end(self, episode: str) -> None:
        self._live.pop(episode, None)

    async def close(self) -> None:
        self._live.clear()


class _Agent(Environment):
    """Stands for an agent during preparation: it has no tools and no prompt before it runs."""

    def step(self, action: str) -> Step:
        raise NotImplementedError("an agent asks by itself")


def make_host(
    environment: str, kwargs: Mapping[str, Any], settings: EnvironmentsConfig, *, batched: bool = False
) -> Host:
    """Return the host of an environment's programs. Raises ValueError for a missing code path.

    ``batched``: its episodes share a process and are answered in batches.
    """
    if environment in BUILTIN:
        return _LocalHost(partial(Program, BUILTIN[environment], kwargs))
    if environment.startswith(AGENT):
        from grpo_dist.environments.agent import command_of

        command_of(environment, settings)
        return _LocalHost(partial(Program, _Agent, {}))
    host = ProcessHost(
        f"grpo_dist.environments.{'batches:BatchProgram' if batched else 'program:Program'}",
        {"environment": environment, "kwargs": dict(kwargs)},
        limits=Limits(memory_mb=settings.memory_mb, reply_kb=_REPLY_KB),
        isolation=None,
        code_paths=settings.code_paths,
        python=settings.python,
        start_s=settings.timeout_s,
    )
    return BatchHost(host) if batched else host


@dataclass(slots=True)
class _Episode:
    host: Host
    problem: dict[str, Any]
    started: bool = False
    failed: bool = False


class EpisodeRunner:
    """All episodes of one environment worker. Calls are concurrent across episodes, sequential within one."""

    def __init__(self, settings: EnvironmentsConfig) -> None:
        self._settings = settings
        self._hosts: dict[str, Host] = {}
        self._episodes: dict[str, _Episode] = {}
        self._sandbox: PythonSandbox | None = None
        self._agents: Agents | None = None  # started with the first agent

    async def start(self, *, sandboxed: bool = True) -> list[str]:
        """Start shared resources. Returns notes on the isolation of the policy's code.

        Args:
            sandboxed: whether an environment has the tool `python`.

        Raises:
            UserError: no code can run, for example because a sandbox service does not answer.
        """
        if not sandboxed:
            return []
        self._sandbox = PythonSandbox(self._settings.sandbox)
        try:
            return await self._sandbox.start()
        except (ProcessFailure, RuntimeError) as failure:
            where, remedy = "`environments.sandbox`", "see the limits and the backend there"
            if url := masked_text(self._settings.sandbox.url or ""):
                where, remedy = f"`environments.sandbox.url` = {url}", "start the service, or correct it"
            raise UserError(f"{where}: no code can be run ({failure}); {remedy}") from failure

    async def begin(self, episode: str, task: Task, problem: Problem) -> None:
        """Start an episode's process early. If that fails, the first action raises the error."""
        if task.environment.startswith(AGENT):
            with suppress(OSError, ValueError):
                await self._start_agent(episode, task, problem)
        elif episode not in self._episodes:
            with suppress(ProcessFailure, ValueError):
                state = self._episodes[episode] = _Episode(self._host(task), asdict(problem))
                await state.host.begin(episode)
                if episode not in self._episodes:  # it ended while its process started
                    await state.host.end(episode)

    async def act(self, episode: str, task: Task, problem: Problem, action: Action, *, turn: int) -> Observed:
        """Answer an action. The first action begins the episode if `begin` has not.

        Raises UnknownEpisode for a later action of another worker's episode. An environment failure is
        returned as `Observed.failed`, not raised.
        """
        if task.environment.startswith(AGENT):
            try:
                return await (await self._start_agent(episode, task, problem, turn)).act(episode, action)
            except (OSError, ValueError) as error:
                return Observed(failed=f"{task.environment}: {error}"[:_REASON])
        if episode not in self._episodes and turn > 0:
            raise UnknownEpisode(episode)
        try:
            if episode not in self._episodes:
                self._episodes[episode] = _Episode(self._host(task), asdict(problem))
            state = self._episodes[episode]
            if action.malformed:
                return Observed(calls=(ToolCall("", "", action.malformed, "malformed", 0.0),))
            if action.calls:
                return Observed(calls=tuple([await self._call(episode, state, c) for c in action.calls]))
            answer = await self._ask(episode, state, "step", action=action.text)
        except ProcessFailure as failure:
            state.failed = True
            return Observed(failed=f"{task.environment}: {failure.outcome}: {failure}"[:_REASON])
        except asyncio.CancelledError:
            state.failed = True  # its process was killed; do not start one to close it
            raise
        except Exception as error:  # a built-in environment failed, or its code path is missing
            return Observed(failed=f"{task.environment}: {raised(error)}"[:_REASON])
        observation = answer["observation"]
        content = observation if isinstance(observation, str) else tuple(observation)
        return Observed(content, reward=answer["reward"], done=answer["done"])

    async def end(self, episode: str) -> None:
        """End an episode and delete its files. Does nothing for an unknown one."""
        if self._agents is not None:
            await self._agents.end(episode)
        if (state := self._episodes.pop(episode, None)) is not None:
            if state.started and not state.failed:
                with suppress(ProcessFailure):  # the sample is already complete
                    await state.host.ask(episode, "close", {}, timeout_s=_CLOSE_S)
            await state.host.end(episode)
            if self._sandbox is not None:
                await self._sandbox.end(episode)

    async def close(self) -> None:
        self._episodes.clear()
        if self._agents is not None:
            await self._agents.close()
        for host in self._hosts.values():
            await host.close()
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _start_agent(self, episode: str, task: Task, problem: Problem, turn: int = 0) -> Agents:
        """Start the episode's program if it is not running. Raises UnknownEpisode mid-episode."""
        from grpo_dist.environments.agent import Agents

        self._agents = self._agents or Agents(self._settings)
        if not self._agents.has(episode):
            if turn > 0:
                raise UnknownEpisode(episode)
            await self._agents.begin(episode, task, problem)
        return self._agents

    def _host(self, task: Task) -> Host:
        key = f"{task.environment} {json.dumps(dict(task.kwargs), sort_keys=True)}"
        if key not in self._hosts:
            kwargs, batched = task.kwargs, task.batched
            self._hosts[key] = make_host(task.environment, kwargs, self._settings, batched=batched)
        return self._hosts[key]

    async def _ask(self, episode: str, state: _Episode, kind: str, **payload: Any) -> Any:
        begin, state.started = not state.started, True
        return await state.host.ask(
            episode,
            kind,
            {"problem": state.problem, "begin": begin, **payload},
            timeout_s=self._settings.timeout_s,
        )

    async def _call(self, episode: str, state: _Episode, call: Call) -> ToolCall:
        try:
            answer = await self._ask(episode, state, "call", **asdict(call))
        except ProcessFailure as failure:
            if failure.infrastructure or not failure.lost:
                raise
            described = await state.host.ask(episode, "describe", {}, timeout_s=self._settings.timeout_s)
            if not described["stateless"]:
                raise
            return ToolCall(call.name, call.arguments, str(failure), failure.outcome, 0.0)
        if "code" in answer:
            assert self._sandbox is not None, "the runner was started without a sandbox"
            ran = await self._sandbox.run(episode, replace_surrogates(answer["code"]))
            return ToolCall(call.name, call.arguments, ran.output, ran.outcome, ran.seconds)
        return ToolCall(call.name, call.arguments, answer["result"], answer["outcome"], answer["seconds"])


# Before a run


T = TypeVar("T")
_PROBE_EPISODE = "preparation"


@dataclass(frozen=True, slots=True)
class Description:
    """Properties of an environment class.

    Attributes:
        tools: JSON schemas.
        sandboxed: whether it has the tool `python`.
        asks: whether it overrides `start`.
        stateless: it overrides neither `start` nor `step`, and no tool is a method, so an episode can
            continue in a new process.
        batched: it has `step_batch`.
        has_problems: whether it provides problems.
        stop: texts that end an action.
    """

    tools: tuple[Mapping[str, Any], ...]
    sandboxed: bool
    asks: bool
    stateless: bool
    batched: bool
    has_problems: bool
    stop: tuple[str, ...] = ()


class StartFailed(ValueError):
    """``start`` failed for the problem with this index."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index, self.reason = index, reason


@dataclass(frozen=True, slots=True)
class EnvironmentProbe:
    """One environment of a run. Each method starts and ends processes, and raises ValueError if the
    environment cannot be used.
    """

    name: str
    kwargs: Mapping[str, Any]
    settings: EnvironmentsConfig

    def describe(self) -> Description:
        return self._run(self._describe)

    def questions(self, problems: Sequence[Problem]) -> tuple[Description, list[Any]]:
        """Return the description, and `start`'s prompt for each problem: text or messages.

        Without an overridden `start`, only the first problem is tried. Raises StartFailed.
        """

        async def ask(host: Host) -> tuple[Description, list[Any]]:
            described = await self._describe(host)
            prompts: list[Any] = [problem.text for problem in problems]
            for index, problem in enumerate(problems if described.asks else problems[:1]):
                try:
                    prompts[index] = await self._ask(host, "start", {"problem": asdict(problem)})
                except ValueError as error:
                    raise StartFailed(index, str(error)) from error
            if described.asks:
                await self._ask(host, "close", {})  # the last problem; each `start` closes the one before
            return described, prompts

        return self._run(ask)

    def environment_problems(self, split: str, count: int | None) -> list[dict[str, Any]]:
        """Return at most ``count`` rows that the environment provides."""

        async def ask(host: Host) -> list[dict[str, Any]]:
            if not (await self._describe(host)).has_problems:
                raise ValueError(
                    f"environment {self.name} provides no problems; set the source's `path`, or "
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
            host = make_host(self.name, self.kwargs, self.settings)
            try:
                return await ask(host)
            finally:
                await host.close()

        return asyncio.run(run())

    async def _describe(self, host: Host) -> Description:
        return Description(**await self._ask(host, "describe", {}))

    async def _ask(self, host: Host, kind: str, payload: Mapping[str, Any]) -> Any:
        try:
            answer = await host.ask(_PROBE_EPISODE, kind, payload, timeout_s=self.settings.timeout_s)
        except ProcessFailure as failure:
            what = "" if kind == "describe" else f" {kind}:"
            reason = str(failure).removeprefix("ValueError: ")
            outcome = "" if failure.outcome == "error" else f" {failure.outcome}:"
            raise ValueError(f"environment {self.name}:{what}{outcome} {reason}") from failure
        return replace_surrogates(answer)
