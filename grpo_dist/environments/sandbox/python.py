"""The Python tool: one interpreter per episode that keeps its variables, on any backend."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

from grpo_dist.config.environments import SandboxConfig
from grpo_dist.environments.sandbox.frames import OUTCOMES
from grpo_dist.environments.sandbox.host import ProcessFailure, ProcessHost
from grpo_dist.environments.sandbox.isolation import Isolation, Limits
from grpo_dist.environments.sandbox.service import CodeService
from grpo_dist.environments.sandbox.trial import find_isolation

_PROGRAM = "grpo_dist.environments.sandbox.interpreter:Interpreter"
OUTPUT_KB = 64  # output kept per call
_READY_S = 300.0  # limit for an interpreter's start, not counted against calls
_GONE = "The interpreter was ended: variables and files of earlier calls are gone."
_USED_UP = "no time is left for calls of this episode"


@dataclass(frozen=True, slots=True)
class CodeResult:
    """The result of a call.

    Attributes:
        output: stdout and stderr in order, the value of a last expression, a traceback; cut to
            ``output_kb``. It reports a lost interpreter.
        outcome: ok | error | timeout | memory | died.
        seconds: wall-clock time of the code.
        began: False if the interpreter was lost before the call, so the code did not run.
    """

    output: str
    outcome: str
    seconds: float
    began: bool = True


class CodeBackend(Protocol):
    """Where code runs. ``run`` raises ProcessFailure for code without a result."""

    async def start(self) -> list[str]: ...
    async def run(self, episode: str, code: str, timeout_s: float) -> tuple[str, str, float]: ...
    async def end(self, episode: str) -> None: ...
    async def close(self) -> None: ...


class PythonSandbox:
    """Runs code of the policy, for any number of episodes at once.

    Args:
        isolation: isolation of the process backend; None: the strongest that works here.
        output_kb: KiB of output kept per call, from its start and end.
    """

    def __init__(
        self, settings: SandboxConfig, *, isolation: Isolation | None = None, output_kb: int = OUTPUT_KB
    ) -> None:
        self._settings = settings
        self._backend: CodeBackend
        if settings.url is None:
            self._backend = InterpreterProcesses(settings, isolation, output_kb)
        else:
            self._backend = CodeService(settings, output_kb)
        self._used_s: dict[str, float] = {}

    async def start(self) -> list[str]:
        """Start the backend. Returns sentences that describe the confinement. Raises ProcessFailure."""
        return await self._backend.start()

    async def run(self, episode: str, code: str) -> CodeResult:
        """Run ``code`` in the episode's interpreter, started by the first call.

        Never raises for the code's errors. Raises ProcessFailure if the machine or the service failed.
        """
        settings, used_s = self._settings, self._used_s.get(episode, 0.0)
        timeout_s = min(settings.call_s, settings.episode_s - used_s)
        if timeout_s <= 0:
            return CodeResult(f"[{_USED_UP}: {settings.episode_s:g} s]\n", "timeout", 0.0)
        begin, began = time.monotonic(), True
        try:
            outcome, output, seconds = await self._backend.run(episode, code, timeout_s)
        except ProcessFailure as failure:
            if failure.infrastructure:
                raise
            outcome, seconds, began = failure.outcome, time.monotonic() - begin, failure.began
            output = failure.output + "\n" * (bool(failure.output) and not failure.output.endswith("\n"))
            output += f"[{failure.detail}{'. ' + _GONE if failure.lost else ''}]\n"
        self._used_s[episode] = used_s + seconds
        output = output.replace("\0", "\\x00")  # tokenizers and record files reject it
        return CodeResult(output, outcome if outcome in OUTCOMES else "error", seconds, began)

    async def end(self, episode: str) -> None:
        """End the episode's interpreter and delete its files. Does nothing for an unknown episode."""
        self._used_s.pop(episode, None)
        await self._backend.end(episode)

    async def close(self) -> None:
        await self._backend.close()


class InterpreterProcesses:
    """Interpreters in local processes."""

    def __init__(self, settings: SandboxConfig, isolation: Isolation | None, output_kb: int) -> None:
        self._isolation = isolation
        self._limits = Limits(
            memory_mb=settings.memory_mb,
            cpu_s=settings.cpu_s,
            processes=settings.processes,
            files_mb=settings.files_mb,
            output_kb=output_kb,
            reply_kb=16,
        )
        self._host: ProcessHost | None = None
        self._cpu_s: dict[str, float] = {}  # of an episode's lost interpreters

    async def start(self) -> list[str]:
        if self._isolation is None:
            self._isolation, notes = await find_isolation()
        else:
            notes = self._isolation.describe()
        self._host = ProcessHost(_PROGRAM, {}, limits=self._limits, isolation=self._isolation)
        await self._host.start()
        return notes

    async def run(self, episode: str, code: str, timeout_s: float) -> tuple[str, str, float]:
        assert self._host is not None, "run before start"
        limit_s, used_s = self._limits.cpu_s or math.inf, self._cpu_s.get(episode, 0.0)
        if used_s >= limit_s:
            detail = f"no CPU time is left for calls of this episode: {limit_s:g} s"
            raise ProcessFailure("timeout", detail, lost=False)
        if not self._host.is_live(episode):
            try:
                await self._host.ask(episode, "ready", None, timeout_s=_READY_S)
            except ProcessFailure as failure:  # before any policy code ran
                failure.infrastructure = True
                raise
        try:
            reply = await self._host.call(episode, "run", code, timeout_s=timeout_s, cpu_s=limit_s - used_s)
        except ProcessFailure as failure:
            self._cpu_s[episode] = used_s + failure.cpu_s
            raise
        return str(reply.value), reply.output, reply.seconds

    async def end(self, episode: str) -> None:
        self._cpu_s.pop(episode, None)
        if self._host is not None:
            await self._host.end(episode)

    async def close(self) -> None:
        if self._host is not None:
            await self._host.close()
