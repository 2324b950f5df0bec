"""Runs a program in one process per episode, for any number of coroutines.

ask(episode, ...)     owner's event loop     zygote                  one keeper and one worker per episode
    first request ----------- start ------>  fork a keeper ------->  fork a worker
    each  ------------------- request ---------------------------->  program.handle(kind, payload)
          <------------------ answer ------------------------------  reply, or the reason for none
end(episode)  --------------- end -------->  kill all its processes, delete its files

All processes end with the owner, even if it is killed: the zygote and each keeper hold one of its sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from grpo_dist.environments.sandbox.frames import ANSWER, OUTCOMES, REQUEST, TOKEN_BYTES, receive_soon
from grpo_dist.environments.sandbox.isolation import Isolation, Limits, remove_tree
from grpo_dist.runtime.processes import child_command, code_directories, kill_marked, python_path


class ProcessFailure(Exception):
    """A request without a result.

    Attributes:
        outcome: timeout | memory | died | error.
        lost: whether the process is gone, with the episode's state.
        output: output before the failure, cut to ``Limits.output_kb``.
        infrastructure: whether the machine or a service failed, not the request's code.
        cpu_s: CPU seconds of the lost processes, if measured.
        began: False if the process was lost with its zygote before the request, so no code caused it.
    """

    def __init__(
        self, outcome: str, detail: str, *, lost: bool = True, output: str = "", infrastructure: bool = False
    ) -> None:
        super().__init__(outcome, detail)
        self.outcome, self.detail, self.lost, self.output = outcome, detail, lost, output
        self.infrastructure = infrastructure
        self.cpu_s, self.began = 0.0, True

    def __str__(self) -> str:
        return self.detail

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(ProcessFailure, lost=self.lost, output=self.output, infrastructure=self.infrastructure)
        return make, (self.outcome, self.detail)


def lost_zygote(what: str) -> ProcessFailure:
    """Return the failure of an episode whose zygote ``what``."""
    return ProcessFailure("died", f"the process that starts others {what}", infrastructure=True)


@dataclass(slots=True)
class LiveEpisode:
    """An episode with a process. ``lock``: one request at a time. ``ended``: its processes are gone."""

    number: int
    channel: socket.socket
    started: asyncio.Future[None]
    ended: asyncio.Future[None]
    failed: ProcessFailure | None = None  # the start failed, or the zygote is lost
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_idle(self) -> bool:
        """Whether its process has started and no request is running."""
        return self.started.done() and not self.started.cancelled() and not self.lock.locked()

    def conclude(self, failed: ProcessFailure | None) -> None:
        """Notify all waiting callers that the process has ended."""
        self.failed = failed
        for future in (self.started, self.ended):
            if not future.done():
                future.set_result(None)


# Environment variables of the policy's code, besides those that Python needs.
_HARMLESS = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


def environment_of(code_paths: Sequence[str], *, trusted: bool) -> dict[str, str]:
    """Return the processes' environment variables. Raises ValueError for a missing directory."""
    directories = code_directories("code_paths", code_paths, "environments")
    variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if trusted:
        return os.environ | variables | {"PYTHONPATH": python_path(directories)}
    variables |= {name: os.environ[name] for name in _HARMLESS if name in os.environ}
    variables |= {"PYTHONHASHSEED": "0"}  # makes set order reproducible
    return variables | {"PYTHONPATH": os.pathsep.join(directories)}


START_S = 300.0  # limit for the zygote's import and for a fork, on a busy machine
_GRACE_S = 30.0  # added to the keeper's deadline; after it the keeper counts as lost, too
_END_S = 30.0  # limit for killed processes to end; after it they are abandoned
_MESSAGE = 1 << 16
_MARK = "GRPO_DIST_SANDBOX"  # environment variable inherited by all processes of a host
_ZYGOTE = "grpo_dist.environments.sandbox.zygote"


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a request, with its output cut to ``Limits.output_kb``."""

    value: Any
    output: str
    seconds: float


class ProcessHost:
    """A process per episode, forked at its first request from a zygote that has imported the program.

    Args:
        program: "module:Class". An episode's process creates Class(**arguments), then calls
            ``.handle(kind, payload)`` per request; it may be asynchronous. Payloads and results are JSON.
        isolation: confinement of the processes; None: code is trusted and inherits the environment.
        code_paths: directories searched before PYTHONPATH and installed packages.
        python: interpreter of the processes; None: this one.
        start_s: limit for the zygote's import and preload, if longer than `START_S`.
    """

    def __init__(
        self,
        program: str,
        arguments: dict[str, Any],
        *,
        limits: Limits,
        isolation: Isolation | None,
        code_paths: Sequence[str] = (),
        python: str | None = None,
        start_s: float = 0.0,
    ) -> None:
        self._python, self._start_s = python, max(START_S, start_s)
        self._settings = {
            "program": program,
            "arguments": arguments,
            "limits": asdict(limits),
            "isolation": asdict(isolation) if isolation else None,
        }
        self._program, self._longest = program, limits.reply_kb * 1024 + (limits.output_kb + 1) * 1024
        self._environment = environment_of(code_paths, trusted=isolation is None)
        self._live: dict[str, LiveEpisode] = {}
        self._by_number: dict[int, LiveEpisode] = {}
        self._lost: set[str] = set()  # episodes whose zygote ended between requests
        self._count, self._cpu_s = 0, math.inf if limits.cpu_s is None else limits.cpu_s
        self._child: subprocess.Popen[bytes] | None = None
        self._starting = asyncio.Lock()
        self._start: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the zygote and import the program. Raises ProcessFailure "error" if that fails."""
        if self._start is None or (self._start.done() and self._child is None):
            self._start = asyncio.create_task(self._start_once())
        await asyncio.shield(self._start)  # shared with other callers, so never cancelled

    async def ask(self, episode: str, kind: str, payload: Any, *, timeout_s: float) -> Any:
        """Return ``handle(kind, payload)`` from the episode's process, forked at the first request.

        Raises ProcessFailure, also if the process was lost since the last request. If ``lost``, the next
        request starts a new process.
        """
        return (await self.call(episode, kind, payload, timeout_s=timeout_s)).value

    async def call(
        self, episode: str, kind: str, payload: Any, *, timeout_s: float, cpu_s: float | None = None
    ) -> Reply:
        """Like `ask`, with the output. ``cpu_s``: limit over all requests; None: from `Limits`."""
        cpu_s = self._cpu_s if cpu_s is None else cpu_s
        if episode in self._lost:
            self._lost.remove(episode)
            failure = ProcessFailure("died", "the process had ended, with the one that starts others")
            failure.began = False
            raise failure
        request = json.dumps([kind, payload]).encode()
        live = self._live.get(episode) or await self.begin(episode)
        async with live.lock:
            number = secrets.token_bytes(TOKEN_BYTES)
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    loop = asyncio.get_running_loop()
                    header = REQUEST.pack(number, timeout_s, cpu_s, len(request))
                    await loop.sock_sendall(live.channel, header + request)
                    outcome, body, output, seconds, used_s = await self._answer(live.channel, number)
            except TimeoutError:
                await self._drop(episode, live)
                raise ProcessFailure("timeout", f"no result within {timeout_s:g} s") from None
            except (OSError, EOFError):
                await self._drop(episode, live)
                raise live.failed or ProcessFailure("died", "the process had ended") from None
            except BaseException:  # cancelled: the next request must not get this request's reply
                self._forget(episode, live)
                raise
            finally:
                if self._live.get(episode) is not live:
                    live.channel.close()
        if outcome != "ok":
            await self._drop(episode, live)
            failure = ProcessFailure(outcome, body.decode(errors="replace"), output=output)
            failure.cpu_s = used_s
            raise failure
        return Reply(self._value(body, output), output, seconds)

    async def end(self, episode: str) -> None:
        """End the episode's processes and delete its files. Ignores unknown episodes."""
        self._lost.discard(episode)
        if (live := self._live.get(episode)) is not None:
            await self._drop(episode, live)

    async def close(self) -> None:
        """End all episodes and the zygote. Safe to call twice."""
        if self._start is not None and not self._start.done():
            if self._child is not None:
                self._child.kill()  # does not wait for an import
            await asyncio.wait([self._start])  # bounded: by the start's timeout
        async with self._starting:
            if self._child is not None:
                await self._lose_zygote()
            self._lost.clear()

    def is_live(self, episode: str) -> bool:
        """Return whether the episode has a process, possibly a dead one."""
        return episode in self._live or episode in self._lost

    @staticmethod
    def _value(body: bytes, output: str) -> Any:
        """Parse a worker's untrusted reply."""
        try:
            status, value = json.loads(body)
        except (ValueError, TypeError, RecursionError):
            raise ProcessFailure("error", "an unreadable reply", lost=False, output=output) from None
        if status == "ok":
            return value
        outcome = "memory" if status == "memory" else "error"
        raise ProcessFailure(outcome, str(value), lost=False, output=output)

    async def _answer(self, channel: socket.socket, number: bytes) -> tuple[str, bytes, str, float, float]:
        answered, index, seconds, used_s, size, printed = ANSWER.unpack(
            await receive_soon(channel, ANSWER.size)
        )
        if answered != number or size + printed > self._longest:
            raise EOFError
        body, output = await receive_soon(channel, size), await receive_soon(channel, printed)
        return OUTCOMES[index], body, output.decode(errors="replace"), seconds, used_s

    async def begin(self, episode: str) -> LiveEpisode:
        """Fork the episode's process if it has none. Raises ProcessFailure."""
        await self.start()
        if (other := self._live.get(episode)) is not None:  # another request was faster
            return other
        mine, keeper_end = socket.socketpair()
        mine.setblocking(False)
        self._count += 1
        loop = asyncio.get_running_loop()
        live = LiveEpisode(self._count, mine, loop.create_future(), loop.create_future())
        self._live[episode] = self._by_number[live.number] = live
        try:
            await self._start_episode(live, keeper_end)
        except OSError as error:
            self._forget(episode, live)
            raise lost_zygote(f"has ended ({error})") from None
        except BaseException:
            self._forget(episode, live)
            raise
        finally:
            keeper_end.close()
        return live

    async def _start_episode(self, live: LiveEpisode, child_end: socket.socket) -> None:
        """Request a keeper for ``child_end``; start a new zygote if the old one is gone."""
        zygote = self._child
        try:
            await self._ask_zygote(live, child_end)
        except (BrokenPipeError, ConnectionResetError):
            await asyncio.shield(self._replace_zygote(zygote, kept=live))
            await self.start()
            await self._ask_zygote(live, child_end)

    async def _ask_zygote(self, live: LiveEpisode, child_end: socket.socket) -> None:
        """Request a keeper, and replace a zygote that does not answer. Raises ProcessFailure."""
        zygote = self._child
        try:
            async with asyncio.timeout(START_S):
                await self._tell({"do": "start", "episode": live.number}, child_end)
                await live.started
        except TimeoutError:
            await asyncio.shield(self._replace_zygote(zygote, hangs=True))
            raise lost_zygote(f"did not answer within {START_S:g} s") from None
        if live.failed:
            raise live.failed

    async def _tell(self, message: dict[str, Any], descriptor: socket.socket | None = None) -> None:
        """Send a message to the zygote; wait while it is busy."""
        packed, descriptors = json.dumps(message).encode(), [descriptor.fileno()] if descriptor else []
        while True:
            try:
                socket.send_fds(self._control, [packed], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(0.002)

    def _forget(self, episode: str, live: LiveEpisode) -> None:
        """Close the episode's socket, at which its keeper exits and ends its processes."""
        with contextlib.suppress(OSError):
            live.channel.shutdown(socket.SHUT_RDWR)
        if not live.lock.locked():  # else the waiting request closes it
            live.channel.close()
        if self._live.get(episode) is live:
            del self._live[episode]

    async def _drop(self, episode: str, live: LiveEpisode) -> None:
        """End the episode's processes and wait until all are gone."""
        self._forget(episode, live)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                with contextlib.suppress(OSError):  # the zygote has ended, with this episode
                    await self._tell({"do": "end", "episode": live.number})
                await asyncio.shield(live.ended)

    async def _start_once(self) -> None:
        async with self._starting:
            if self._child is None:
                await self._start_zygote()

    async def _start_zygote(self) -> None:
        mine, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        self._control, self._mark = mine, secrets.token_hex(16)
        self._directory = directory = tempfile.mkdtemp(prefix="grpo-dist-sandbox-")
        try:
            self._child = subprocess.Popen(
                child_command(_ZYGOTE, zygote_end.fileno(), directory, python=self._python),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self._environment | {_MARK: self._mark},
                pass_fds=(zygote_end.fileno(),),
                start_new_session=True,  # only the owner handles Ctrl-C
            )
        finally:
            zygote_end.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._start_s):
                await loop.sock_sendall(mine, json.dumps(self._settings).encode())
                message = await loop.sock_recv(mine, _MESSAGE)
        except OSError as error:  # TimeoutError is one
            why = f"not started ({type(error).__name__})"
            if isinstance(error, TimeoutError):
                why = f"not imported and preloaded within {self._start_s:g} s"
                why += "" if self._settings["isolation"] else "; raise `environments.timeout_s` above that"
            message = json.dumps({"failed": why, "trace": ""}).encode()
        answer = json.loads(message or b'{"failed": "its process ended", "trace": ""}')
        if not answer.get("ready"):
            await self._lose_zygote()
            detail = f"{self._program}: {answer['failed'].strip()}"
            failure = ProcessFailure("error", detail, infrastructure=True)
            failure.add_note(answer["trace"])
            raise failure
        loop.add_reader(mine, self._hear)

    def _hear(self) -> None:
        """Handle messages from the zygote."""
        try:
            message = self._control.recv(_MESSAGE)  # bounded: does not block
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(self._control)
            self._replacement = asyncio.ensure_future(self._replace_zygote(self._child))
            return
        report = json.loads(message)
        if (live := self._by_number.get(report["episode"])) is None:
            return
        if report["is"] != "started":
            del self._by_number[live.number]
            reason = f"it could not be started: {report.get('reason')}"
            failed = ProcessFailure("error", reason, infrastructure=True)
            live.conclude(failed if report["is"] == "failed" else None)
        elif not live.started.done():
            live.started.set_result(None)

    async def _replace_zygote(
        self, lost: subprocess.Popen[bytes] | None, kept: LiveEpisode | None = None, *, hangs: bool = False
    ) -> None:
        """Drop a zygote that has ended or hangs. Its episodes are lost, except ``kept``, which it never
        started. The next request starts a new zygote.
        """
        async with self._starting:
            if self._child is lost and lost is not None:
                if hangs:
                    lost.kill()
                await self._lose_zygote(kept)

    async def _lose_zygote(self, kept: LiveEpisode | None = None) -> None:
        """End the zygote with its child processes, and leftovers if it was killed."""
        child, self._child = self._child, None
        assert child is not None
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        for episode, live in list(self._live.items()):
            if live is not kept:
                if live.is_idle:  # no running request reports the loss
                    self._lost.add(episode)
                self._forget(episode, live)
        try:
            await asyncio.to_thread(child.wait, _END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            await asyncio.to_thread(child.wait, _END_S)
        if child.returncode:
            await asyncio.to_thread(kill_marked, f"{_MARK}={self._mark}")
            await asyncio.to_thread(remove_tree, self._directory)
        for live in self._by_number.values():
            if live is not kept:
                live.conclude(lost_zygote("has ended"))
        self._by_number = {} if kept is None else {kept.number: kept}
