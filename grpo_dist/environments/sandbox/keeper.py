"""The parent of an episode's process: forwards requests, enforces deadlines and limits, and ends all
processes.

owner --socket--> keeper --pipes--> worker --> what its code starts
  zygote --lifeline--^                             |  setsid, double fork
                     ^-- becomes its child --------+

No environment or policy code runs here. In a PID namespace the keeper is the first process, so all others end
with it.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from grpo_dist.environments.sandbox import worker
from grpo_dist.environments.sandbox.frames import INNER, REQUEST, TOKEN_BYTES, KeptOutput, pack_answer, read
from grpo_dist.environments.sandbox.isolation import MOST_FILES, Limits, TreeUsage, files_exceed
from grpo_dist.runtime.processes import become_subreaper, descendants, kill_descendants, reap

_WATCH_S = 0.25  # interval between usage measurements, over all requests
_KILLED_S = 5.0  # limit for killed processes to end
_DRAINED = 1 << 20  # bytes of output read after the reply, because leftover processes may keep printing
_PIECE = 1 << 16


def _pid_in_proc() -> int:
    """Return this process's id in the host's /proc, its working directory."""
    return int(os.readlink("self"))


def _milliseconds(seconds: float) -> float:
    """Return a poll timeout; negative would mean no limit."""
    return 1000 * max(0.0, seconds) + 1


class Keeper:
    """Supervises one worker.

    Args:
        start: confines the worker's process and returns the program's factory; called in the worker.
        channel: socket to the owner; the episode ends when it closes.
        lifeline: read end of a pipe that only the zygote can write to.
        contained: whether a PID namespace holds all processes of the episode.
        watched: directory whose files are measured, too; "": their file system has a fixed size.
    """

    def __init__(
        self,
        start: Callable[[], Callable[[], object]],
        channel: socket.socket,
        lifeline: int,
        limits: Limits,
        *,
        contained: bool,
        watched: str = "",
    ) -> None:
        self._start, self._channel, self._lifeline = start, channel, lifeline
        self._limits, self._contained, self._watched = limits, contained, watched
        self._status: int | None = None  # wait status of the worker
        self._excess_between: tuple[str, bytes] | None = None  # two requests; the second one reports it
        self._cpu_s, self._measures_at = math.inf, time.monotonic() + _WATCH_S

    def run(self) -> NoReturn:
        """Serve the owner until the episode ends or its worker is lost."""
        become_subreaper()
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken)
        self._wake = wake
        self._memory_at_start = TreeUsage.measure({_pid_in_proc()}, exact=False).memory
        self._fork(woken)
        with suppress(EOFError, OSError):  # the owner or the zygote is gone
            while self._wait_for_request():
                channel = self._channel.fileno()
                number, timeout_s, self._cpu_s, size = REQUEST.unpack(read(channel, REQUEST.size))
                payload = read(channel, size)
                begin = time.monotonic()
                output = KeptOutput(self._limits.output_kb * 1024)
                if self._excess_between is None:
                    outcome, body = self._exchange(payload, begin + timeout_s, timeout_s, output)
                else:
                    outcome, body = "died", b"after the last request: " + self._excess_between[1]
                if outcome in ("timeout", "died") or self._status is not None:
                    self._kill()
                seconds = time.monotonic() - begin
                cpu_s = 0.0 if self._status is None else self._used_cpu()
                answer = pack_answer(number, outcome, body, output.bytes(), seconds, cpu_s)
                self._channel.sendall(answer)
                if self._status is not None:
                    break
        self._kill()
        os._exit(0)

    def _fork(self, woken: int) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe() if self._limits.output_kb else (-1, os.open(os.devnull, os.O_WRONLY))
        self._worker = os.fork()
        if not self._worker:
            try:
                os.setpgid(0, 0)
                worker.redirect(output)
                keeper_ends = (self._requests, self._replies, self._output, self._lifeline, self._wake, woken)
                for descriptor in (*keeper_ends, self._channel.fileno()):
                    if descriptor >= 0:
                        os.close(descriptor)
                worker.serve(self._start_worker(), requests, replies)
            finally:
                os._exit(1)
        for descriptor in (requests, replies, output):
            os.close(descriptor)
        for descriptor in (self._requests, self._replies, self._output):
            if descriptor >= 0:
                os.set_blocking(descriptor, False)

    def _start_worker(self) -> Callable[[], object]:
        try:
            return self._start()
        except BaseException as failure:
            error = failure

        def fail() -> object:
            raise error

        return fail

    def _wait_for_request(self) -> bool:
        """Block until the owner sends a request. Returns False when the episode is over.

        Processes that code left behind are measured meanwhile. What threads of the worker do is limited by
        the kernel, except for files, which the next request measures.
        """
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._lifeline, 0)  # only its hang-up
        poller.register(self._wake, select.POLLIN)
        while True:
            left = len(self._all()) > 1
            wait = _milliseconds(self._measures_at - time.monotonic()) if left else None
            ready = dict(poller.poll(wait))
            self._notice_ends(ready)
            is_lost = self._status is not None and self._excess_between is None
            if self._lifeline in ready or is_lost:
                return False
            if self._channel.fileno() in ready:
                return True
            if left:
                self._excess_between = self._end_excess()

    def _notice_ends(self, ready: dict[int, int]) -> None:
        if self._wake in ready:
            with suppress(BlockingIOError):
                os.read(self._wake, 4096)
            self._status = reap().get(self._worker, self._status)

    def _exchange(
        self, payload: bytes, deadline: float, timeout_s: float, output: KeptOutput
    ) -> tuple[str, bytes]:
        """Forward a request and wait for its reply. Returns outcome and body."""
        token = os.urandom(TOKEN_BYTES)
        rest = memoryview(INNER.pack(token, len(payload)) + payload)
        reply = bytearray()
        poller = select.poll()
        for descriptor, events in (
            (self._channel.fileno(), 0),
            (self._lifeline, 0),
            (self._wake, select.POLLIN),
            (self._requests, select.POLLOUT),
            (self._replies, select.POLLIN),
            (self._output, select.POLLIN),
        ):
            if descriptor >= 0:
                poller.register(descriptor, events)
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout", f"no result within {timeout_s:g} s".encode()
            ready = dict(poller.poll(_milliseconds(min(deadline, self._measures_at) - now)))
            if self._lifeline in ready or self._channel.fileno() in ready:
                raise EOFError
            if self._output in ready and not self._take_output(output, _PIECE):
                poller.unregister(self._output)
            if self._requests in ready and rest:
                rest = self._pass_on(rest)
                if not rest:
                    poller.unregister(self._requests)
            if self._replies in ready:
                result = self._take_reply(reply, token)
                if result is not None:
                    self._take_output(output, _DRAINED)
                    return result
            self._notice_ends(ready)
            if self._status is not None and self._replies not in ready:
                self._take_output(output, _DRAINED)
                return self._how_it_ended()
            if (excess := self._end_excess()) is not None:
                return excess

    def _pass_on(self, rest: memoryview) -> memoryview:
        with suppress(BlockingIOError):
            try:
                rest = rest[os.write(self._requests, rest[:_PIECE]) :]
            except BrokenPipeError:  # noticed later, at the replies or the worker's end
                return rest[len(rest) :]
        return rest

    def _take_reply(self, reply: bytearray, token: bytes) -> tuple[str, bytes] | None:
        """Read available bytes of the reply. Returns outcome and body once it is complete."""
        with suppress(BlockingIOError):
            piece = os.read(self._replies, _PIECE)
            if not piece:
                return self._how_it_ended()
            reply += piece
        if len(reply) < INNER.size:
            return None
        reply_token, size = INNER.unpack_from(reply)
        if reply_token != token:
            return "died", b"its code wrote to the replies of the process"
        if size > self._limits.reply_kb * 1024:
            return "died", f"a reply of {size} bytes; the limit is {self._limits.reply_kb} KiB".encode()
        if len(reply) < INNER.size + size:
            return None
        if len(reply) > INNER.size + size:
            return "died", b"its code wrote to the replies of the process"
        return "ok", bytes(reply[INNER.size :])

    def _take_output(self, output: KeptOutput, most: int) -> bool:
        """Read up to ``most`` bytes of output. Returns whether more can follow."""
        if self._output < 0:
            return False
        with suppress(BlockingIOError):
            while most > 0:
                piece = os.read(self._output, _PIECE)
                if not piece:
                    return False
                output.add(piece)
                most -= len(piece)
        return True

    def _how_it_ended(self) -> tuple[str, bytes]:
        """Return outcome and reason after the worker ended or closed its reply pipe."""
        end = time.monotonic() + 1.0
        while self._status is None and time.monotonic() < end:
            self._status = reap().get(self._worker)
            time.sleep(0.001)
        if self._status is None:
            return "died", b"its code closed the replies of the process"
        if not os.WIFSIGNALED(self._status):
            return "died", f"the process ended with exit status {os.WEXITSTATUS(self._status)}".encode()
        number = os.WTERMSIG(self._status)
        cpu_s = self._limits.cpu_s
        if cpu_s is not None and (
            number == signal.SIGXCPU or (number == signal.SIGKILL and self._used_cpu() >= self._cpu_s)
        ):
            return "timeout", f"more than {cpu_s:g} s of CPU time".encode()
        return "died", f"the process was ended by {signal.Signals(number).name}".encode()

    def _used_cpu(self) -> float:
        """Return CPU seconds of children that have ended."""
        times = os.times()
        return times.children_user + times.children_system

    def _end_excess(self) -> tuple[str, bytes] | None:
        """Measure the usage if it is due, and end all processes at an excess. Returns outcome and reason."""
        if time.monotonic() < self._measures_at:
            return None
        self._measures_at = time.monotonic() + _WATCH_S
        if (excess := self._excess()) is not None:
            self._kill()
        return excess

    def _excess(self) -> tuple[str, bytes] | None:
        """Return outcome and reason if the processes together exceed a limit."""
        pids = self._all()
        used = TreeUsage.measure(pids, exact=False)
        limits, most = self._limits, self._limits.memory_mb * 2**20 + self._memory_at_start
        if limits.cpu_s is not None and used.cpu_s + self._used_cpu() > self._cpu_s:
            return "timeout", f"more than {limits.cpu_s:g} s of CPU time".encode()
        if used.memory > most and TreeUsage.measure(pids, exact=True).memory > most:
            return "memory", f"more than {limits.memory_mb} MiB of memory, all processes together".encode()
        if self._watched and limits.files_mb is not None and files_exceed(self._watched, limits.files_mb):
            return "error", f"more than {limits.files_mb} MiB of files, or {MOST_FILES} of them".encode()
        return None

    def _all(self) -> set[int]:
        return descendants(_pid_in_proc(), proc=".")

    def _kill(self) -> None:
        """Kill all processes of the episode and wait for their end."""
        end = time.monotonic() + _KILLED_S
        if self._contained:  # process ids here differ from the host's /proc
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all processes of this namespace except the first
        else:
            kill_descendants(os.getpid(), proc=".")
        while time.monotonic() < end:
            ended = reap()
            if self._worker in ended:
                self._status = ended[self._worker]
            if not ended and not self._has_children():
                break
            time.sleep(0.002)
        if self._status is None:
            self._status = -1

    def _has_children(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True
