"""External agents: a program in a separate process that calls the engines through an OpenAI-compatible API.

agent's process   POST /v1/chat/completions ------+                            +---> the answer
environment worker                                +--> Observed(request)       |
engine                                                  rows, tokens, sampling +-- Action(reply)

The program gets its episode's OPENAI_BASE_URL and OPENAI_API_KEY, and its row as JSON on standard input. Its
exit ends the episode. A last output line such as {"reward": 1.0} sets the reward of the last turn.

The server listens on loopback only and rejects requests without an episode's key. The program is trusted like
reward and environment code: its process is killed at the end, but not sandboxed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from aiohttp import web

from grpo_dist.config import EnvironmentsConfig
from grpo_dist.environments.base import Problem
from grpo_dist.environments.episode import Action, Observed
from grpo_dist.environments.registry import command_parts, find_part
from grpo_dist.environments.sandbox.host import START_S, environment_of
from grpo_dist.runtime.processes import SET_PARENT_DEATH_SIGNAL, kill_marked
from grpo_dist.types import Task

_MARK = "GRPO_DIST_AGENT"  # environment variable inherited by all of an agent's processes
_PRINTED = 1 << 16  # bytes read from the end of the output
_SHOWN = 600  # characters of standard error quoted in a message
_BODY = 1 << 26  # maximum request size, bytes
# The program dies with this worker, even if the worker is killed.
_RUN = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({SET_PARENT_DEATH_SIGNAL}, 9); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def command_of(environment: str, settings: EnvironmentsConfig) -> list[str]:
    """Return the command of ``environment`` such as "program:my_agent.py --fast". Raises ValueError."""
    command = [str(find_part(part, settings.code_paths) or part) for part in command_parts(environment)]
    if command[0].endswith(".py") and Path(command[0]).is_file():
        return [settings.python or sys.executable, *command]
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"program {command[0]} is neither a Python or executable file in code_paths "
            f"({', '.join(settings.code_paths) or 'none'}) nor a command on PATH; correct it, or add its "
            "directory to code_paths"
        )
    return command


def _without_proxy() -> dict[str, str]:
    """Return the variables with which clients reach this machine without the proxy of ``http_proxy``."""
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if hosts != "*":  # all hosts; clients read no list with it
        hosts = ",".join(filter(None, (hosts, "127.0.0.1", "localhost")))
    return {"no_proxy": hosts, "NO_PROXY": hosts}  # clients differ in which they prefer


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A pending request. A retry replaces ``connection`` and waits for the same reply."""

    body: dict[str, Any]
    connection: web.Request
    reply: asyncio.Future[Mapping[str, Any]]
    delivered: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether the client disconnected before it got the reply."""
        transport = self.connection.transport
        return not self.delivered and (transport is None or transport.is_closing())


@dataclass(slots=True, eq=False)
class _Agent:
    key: str
    process: asyncio.subprocess.Process
    output: IO[bytes]
    errors: IO[bytes]
    requests: asyncio.Queue[_PendingRequest] = field(default_factory=asyncio.Queue)
    last_requests: dict[str, _PendingRequest] = field(default_factory=dict)  # by canonical body
    unanswered: set[_PendingRequest] = field(default_factory=set)
    answering: _PendingRequest | None = None


class Agents:
    """All agents of one environment worker, and their server."""

    def __init__(self, settings: EnvironmentsConfig) -> None:
        self._settings = settings
        self._begun: set[str] = set()  # episodes that have not ended
        self._live: dict[str, _Agent] = {}
        self._by_key: dict[str, _Agent] = {}
        self._numbers = itertools.count()
        self._server: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def begin(self, episode: str, task: Task, problem: Problem) -> None:
        """Start an episode's program, unless the episode ends first. Raises ValueError or OSError if it
        cannot be started.
        """
        command = command_of(task.environment, self._settings)
        self._begun.add(episode)
        async with self._starting:
            if episode in self._live or episode not in self._begun:
                return
            if self._server is None:
                await self._serve()
            assert self._server is not None
            key, (host, port) = secrets.token_urlsafe(24), self._server.addresses[0][:2]
            variables = {
                "OPENAI_BASE_URL": f"http://{host}:{port}/{next(self._numbers)}/v1",
                "OPENAI_API_KEY": key,
                _MARK: key,
                **_without_proxy(),
            }
            row = {
                "problem": problem.text,
                "answer": problem.answer,
                "columns": dict(problem.columns),
                "arguments": {name: value for name, value in task.kwargs.items() if name != "ignore"},
            }
            # Files, because a pipe stays open until all of the program's children exit.
            stdin, output, errors = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115
            with stdin:
                stdin.write(json.dumps(row, default=str).encode() + b"\n")
                stdin.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-S", "-c", _RUN, *command),
                    stdin=stdin,
                    stdout=output,
                    stderr=errors,
                    env=environment_of(self._settings.code_paths, trusted=True) | variables,
                    start_new_session=True,
                )
            self._live[episode] = self._by_key[key] = _Agent(key, process, output, errors)
        if episode not in self._begun:
            await self.end(episode)

    def has(self, episode: str) -> bool:
        return episode in self._live

    async def act(self, episode: str, action: Action) -> Observed:
        """Answer the agent's pending request with ``action``; return its next request, or its end."""
        agent, timeout_s = self._live[episode], self._settings.timeout_s
        limit = f"environments.timeout_s = {timeout_s:g}"
        if agent.answering is None:  # it starts, and all others with it
            timeout_s = max(START_S, timeout_s)
            limit = f"{timeout_s:g} s of its start; raise environments.timeout_s above that"
        else:
            message = {"role": "assistant", "content": action.text}  # used in trials
            agent.answering.reply.set_result(
                action.reply or {"choice": {"message": message, "finish_reason": "stop"}}
            )
            agent.unanswered.discard(agent.answering)
            agent.answering = None
        ending = asyncio.ensure_future(agent.process.wait())  # bounded: cancelled below
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    asking = asyncio.ensure_future(agent.requests.get())  # bounded: by the timeout
                    await asyncio.wait({asking, ending}, return_when=asyncio.FIRST_COMPLETED)
                    if ending.done():
                        asking.cancel()
                        return _read_end(agent)
                    request = asking.result()  # bounded: it is done
                    if not request.is_gone:
                        agent.answering = request
                        return Observed(request=request.body)
                    _drop(agent, request)
        except TimeoutError:
            _kill(agent)
            return Observed(failed=f"the agent neither asked nor ended within {limit}")
        finally:
            ending.cancel()

    async def end(self, episode: str) -> None:
        """End an episode's processes, also those that are being started. Does nothing for an unknown one."""
        self._begun.discard(episode)
        if (agent := self._live.pop(episode, None)) is None:
            return
        del self._by_key[agent.key]  # rejects further requests
        _kill(agent)
        for request in list(agent.unanswered):
            _drop(agent, request)
        await agent.process.wait()  # bounded: it was killed
        await asyncio.to_thread(kill_marked, f"{_MARK}={agent.key}")
        agent.output.close()
        agent.errors.close()

    async def close(self) -> None:
        for episode in list(self._begun):
            await self.end(episode)
        if self._server is not None:
            await self._server.cleanup()

    # The server

    async def _serve(self) -> None:
        application = web.Application(client_max_size=_BODY)
        application.router.add_post("/{episode}/v1/chat/completions", self._answer)
        application.router.add_post("/{episode}/v1/completions", self._answer)
        application.router.add_get("/{episode}/v1/models", self._models)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._server = runner

    def _agent(self, request: web.Request) -> _Agent | None:
        return self._by_key.get(request.headers.get("Authorization", "").removeprefix("Bearer "))

    async def _models(self, request: web.Request) -> web.Response:
        if self._agent(request) is None:
            return _failure(401, "the key does not belong to a running episode", "invalid_api_key")
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if (agent := self._agent(request)) is None:
            return _failure(401, "the key does not belong to a running episode", "invalid_api_key")
        chat = request.path.endswith("/chat/completions")
        try:
            body = await request.json()
            if not isinstance(body, dict) or ("messages" if chat else "prompt") not in body:
                raise ValueError
        except ValueError:
            expected = "messages" if chat else "prompt"
            return _failure(400, f"the body must be a JSON object with `{expected}`", None)
        if agent.key not in self._by_key:  # while the body was read
            return _failure(410, "the episode has ended", "episode_ended")
        body.pop("prompt" if chat else "messages", None)
        name = _canonical(body)
        before = agent.last_requests.get(name)
        retried = request.headers.get("x-stainless-retry-count", "0") != "0"
        if before is not None and (retried or before.is_gone):
            pending = before
            pending.connection = request
        else:
            reply = asyncio.get_running_loop().create_future()
            pending = agent.last_requests[name] = _PendingRequest(body, request, reply)
            agent.unanswered.add(pending)
            agent.requests.put_nowait(pending)
        try:
            answer = await asyncio.shield(pending.reply)
        except asyncio.CancelledError:
            if not pending.reply.cancelled():
                raise
            return _failure(410, "the episode has ended", "episode_ended")
        if "error" in answer:
            pending.delivered = True  # nothing was sampled
            return web.json_response({"error": answer["error"]}, status=answer["status"])
        try:
            if body.get("stream"):
                response = await _stream(request, body, answer, chat=chat)
            else:
                response = web.json_response(_completion(body, answer, chat=chat))
                await response.prepare(request)
                await response.write_eof()
        except ConnectionResetError:  # the client has hung up, and may ask again
            return web.Response()
        pending.delivered = True
        return response


def _completion(body: Mapping[str, Any], answer: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    return {
        **_head(body, "chat.completion" if chat else "text_completion"),
        "choices": [{"index": 0, "logprobs": None, **answer["choice"]}],
        "usage": answer.get("usage"),
    }


def _head(body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
    return head | {"model": body.get("model") or "policy"}


async def _stream(
    request: web.Request, body: Mapping[str, Any], answer: Mapping[str, Any], *, chat: bool
) -> web.StreamResponse:
    """Send a finished answer as server-sent events, all at once."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    events = (*map(json.dumps, chunks(body, answer, chat=chat)), "[DONE]")
    await response.write("".join(f"data: {event}\n\n" for event in events).encode())
    await response.write_eof()
    return response


def chunks(body: Mapping[str, Any], answer: Mapping[str, Any], *, chat: bool) -> Iterator[dict[str, Any]]:
    """Yield OpenAI's stream chunks: role, content, each call, finish reason, and usage if requested."""
    head = _head(body, "chat.completion.chunk" if chat else "text_completion")
    wants_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    if wants_usage:
        head["usage"] = None  # only the last chunk has it
    choice = answer["choice"]
    for part in _deltas(choice["message"]) if chat else [{"text": choice["text"]}]:
        yield head | {"choices": [{"index": 0, "finish_reason": None, "logprobs": None, **part}]}
    nothing: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    last = {"index": 0, "finish_reason": choice["finish_reason"], "logprobs": None}
    yield head | {"choices": [last | nothing]}
    if wants_usage:
        yield head | {"choices": [], "usage": answer.get("usage")}


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    calls, content = message.get("tool_calls", ()), message["content"]
    yield {"delta": {"role": "assistant", "content": None if calls and content is None else ""}}
    if content:
        yield {"delta": {"content": content}}
    for index, call in enumerate(calls):
        yield {"delta": {"tool_calls": [{**call, "index": index}]}}


def _failure(status: int, message: str, code: str | None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True)


def _drop(agent: _Agent, request: _PendingRequest) -> None:
    """Cancel a reply that will not come."""
    agent.unanswered.discard(request)
    if agent.last_requests.get(name := _canonical(request.body)) is request:
        del agent.last_requests[name]
    request.reply.cancel()


def _kill(agent: _Agent) -> None:
    if agent.process.returncode is not None:
        return  # its pid may be reused; `kill_marked` finds leftover processes
    with suppress(ProcessLookupError):
        os.killpg(agent.process.pid, signal.SIGKILL)


def _read_end(agent: _Agent) -> Observed:
    """Return the outcome of an agent that has exited."""
    if code := agent.process.returncode:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        stderr = _read_tail(agent.errors)[-_SHOWN:] or "it printed no error"
        return Observed(failed=f"the agent ended with {how}: {stderr}")
    reward = None
    with suppress(ValueError, TypeError, KeyError, IndexError, RecursionError):
        reward = float(json.loads(_read_tail(agent.output).splitlines()[-1])["reward"])
    return Observed(done=True, reward=reward)


def _read_tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _PRINTED))
    return file.read(_PRINTED).decode(errors="replace").strip()
