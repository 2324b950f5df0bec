"""Environments with `step_batch`: one process holds all of a worker's episodes and answers them in batches.

episode a   ask --+               +-- ask --+              one request at a time; each takes everything that
episode b   ask --+--> request 1  |         +--> request 2   arrived during the previous one
episode c         +-- ask --------+

A request handles starts, tool calls and closes per episode, then steps all other episodes together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from grpo_dist.environments.base import Environment
from grpo_dist.environments.program import Program, awaited, check_step
from grpo_dist.environments.registry import load_environment
from grpo_dist.environments.sandbox.host import ProcessFailure, ProcessHost

_ALL = "all"  # the host's name for the shared process
_CLOSE_S = 60.0  # deadline of a `close` request; no caller waits for it


class BatchProgram:
    """Episodes by name. An exception fails one episode; in `step_batch` it fails all episodes of the call."""

    preload = staticmethod(Program.preload)

    def __init__(self, environment: str, kwargs: Mapping[str, Any]) -> None:
        self._class, self._kwargs = load_environment(environment), kwargs
        self._live: dict[str, Program] = {}

    async def handle(self, kind: str, payload: list[tuple[str, str, dict[str, Any]]]) -> list[list[Any]]:
        """Answer requests of (episode, kind, payload) in order, by ["ok", result] or ["error", reason]."""
        steps = [index for index, (_, kind, _) in enumerate(payload) if kind == "step"]
        answers: list[Any] = await asyncio.gather(
            *(self._begin(e, p) if k == "step" else self._handle(e, k, p) for e, k, p in payload),
            return_exceptions=True,
        )
        running = [index for index in steps if not isinstance(answers[index], BaseException)]
        if running:
            actions = [payload[index][2]["action"] for index in running]
            for index, step in zip(
                running, await self._step([answers[i] for i in running], actions), strict=True
            ):
                answers[index] = step
        return [_reply(answer) for answer in answers]

    async def _begin(self, episode: str, payload: dict[str, Any]) -> Environment:
        return await self._program(episode).begin(payload["problem"], payload["begin"])

    async def _handle(self, episode: str, kind: str, payload: dict[str, Any]) -> Any:
        if kind != "close":
            return await self._program(episode).handle(kind, payload)
        if (program := self._live.pop(episode, None)) is not None:
            await program.handle(kind, payload)
        return None

    async def _step(self, episodes: Sequence[Environment], actions: Sequence[str]) -> list[Any]:
        """Return an answer, or the exception raised, for each action."""
        try:
            steps = list(await awaited(self._class.step_batch(episodes, actions)))
            if len(steps) != len(actions):
                raise ValueError(f"step_batch returned {len(steps)} answers to {len(actions)} actions")
        except Exception as error:
            return [error] * len(actions)
        return [_answer(step) for step in steps]

    def _program(self, episode: str) -> Program:
        if episode not in self._live:
            self._live[episode] = Program(self._class, self._kwargs)
        return self._live[episode]


def _answer(step: Any) -> dict[str, Any] | Exception:
    try:
        return check_step(step)
    except Exception as error:
        return error


def _reply(answer: Any) -> list[Any]:
    if isinstance(answer, BaseException):
        return ["error", f"{type(answer).__name__}: {answer}"]
    return ["ok", answer]


@dataclass(frozen=True, slots=True)
class _Request:
    episode: str
    kind: str
    payload: Any
    timeout_s: float
    answer: asyncio.Future[Any]


class BatchHost:
    """Owns the process of an environment with `step_batch`. Losing the process loses all its episodes."""

    def __init__(self, host: ProcessHost) -> None:
        self._host = host
        self._waiting: list[_Request] = []
        self._sending: asyncio.Task[None] | None = None

    async def ask(self, episode: str, kind: str, payload: Any, *, timeout_s: float) -> Any:
        """Return the answer to a request of ``episode``. Raises ProcessFailure.

        ``timeout_s``: deadline of the batch that carries this request, the current or the next one.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(episode, kind, payload, timeout_s, answer))
        if self._sending is None or self._sending.done():
            # Runs after the other episodes that ask in this tick, so one batch carries them all.
            self._sending = asyncio.create_task(self._send(), name="batches of an environment")
        return await answer

    async def begin(self, episode: str) -> None:
        """Start the shared process."""
        await self._host.begin(_ALL)

    async def end(self, episode: str) -> None:
        """End an episode and remove it from the process, even if its last action was abandoned."""
        if self._host.is_live(_ALL):
            with suppress(ProcessFailure):
                await self.ask(episode, "close", {}, timeout_s=_CLOSE_S)

    async def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        for request in self._waiting:
            request.answer.cancel()
        self._waiting = []
        await self._host.close()

    async def _send(self) -> None:
        while self._waiting:
            batch = [request for request in self._waiting if not request.answer.done()]  # others: abandoned
            self._waiting = []
            if not batch:
                return
            requests = [[request.episode, request.kind, request.payload] for request in batch]
            longest = max(request.timeout_s for request in batch)
            try:
                replies = await self._host.ask(_ALL, "batch", requests, timeout_s=longest)
                answered = list(zip(batch, replies, strict=True))
            except BaseException as error:
                ends = not isinstance(error, ProcessFailure)
                for request in [*batch, *(self._waiting if ends else ())]:
                    _fail(request.answer, error)
                if ends:
                    self._waiting = []
                    raise
                continue
            for request, (status, value) in answered:
                if status == "error":
                    _fail(request.answer, ProcessFailure("error", str(value), lost=False))
                elif not request.answer.done():
                    request.answer.set_result(value)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if answer.done():
        return
    if isinstance(error, asyncio.CancelledError):
        answer.cancel()
    else:
        answer.set_exception(error)
