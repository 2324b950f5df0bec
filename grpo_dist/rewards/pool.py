"""Pool of killable grader processes: a hard deadline per answer, even if the answer hangs a parser.

grade() threads      one each     grader processes
    pair  ---------- pickle ---->  parse, compare       reply in time: the process takes the next pair
          <--------- JSON -------
                                   deadline missed: SIGKILL and a new process; only this pair times out
                                   process died: one retry in a new process, then an error
                                   a line that is no reply to this request: treated as a dead process

User code runs in separate processes, started on first use, so it cannot change results of built-in graders.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import queue
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.child import IMPORTING
from grpo_dist.rewards.math import Grade
from grpo_dist.runtime.hardware import available_cpus
from grpo_dist.runtime.processes import (
    child_command,
    code_directories,
    kill_descendants,
    kill_marked,
    python_path,
)

_MOST_PROCESSES = 64  # on all CPUs of a machine; each has 3 descriptors, and often 1024 are allowed
_START_S = 120.0  # limit for a new process to import the parsers, or a user module, on a busy machine
_TASKS_PER_PROCESS = 2000  # then the process is replaced, because parsers keep caches
_ATTEMPTS = 2  # a process may die for a reason other than its current answer
_KILLED_S = 10.0  # limit for a killed process to exit; a process stuck in the kernel is abandoned
_BUSY = 6  # wall-clock limit of a math grader without enough CPU, as a multiple of its deadline
_LONGEST_POLL_MS = 2**31 - 1  # of the system call; 25 days
_LONGEST_REPLY = 1 << 20  # bytes; far above any reply of a grader
_TOGETHER_S = 2.0  # for an event loop to end calls that are past their deadline
_USER_CODE = ("load", "call")  # kinds whose first argument is a function
_FORGED = "other code, such as a reward function, wrote to the grader's replies"
_MARK = "GRPO_DIST_GRADER"  # environment variable inherited by all that a grader process starts


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without a value; ``outcome`` is ``timeout`` or ``error``."""

    outcome: str
    detail: str


class Died(Failure):
    """The process died during the call."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a user function accepts. ``names``: its parameters, including ``**anything`` by its name.
    ``required``: parameters without a default.
    """

    names: frozenset[str]
    required: frozenset[str] = frozenset()
    is_async: bool = False


class GraderPool:
    """``num_workers`` grader processes shared by any number of threads. Use as a context manager, or `close`.

    The processes end with the process that created the pool, even if that is killed.

    Args:
        timeout_s: deadline of an answer, seconds of wall clock; seconds of CPU for the math grader on a busy
            machine. Starting a process and imports do not count.
        memory_mb: address space a process may add to its size at start, MiB.
        code_paths: directories of custom reward functions, searched before PYTHONPATH and installed packages.
            The working directory is not searched unless it is listed.
        accept_arithmetic, require_box: see `math.grade`.

    Raises:
        ValueError: a number is not positive, or a directory of ``code_paths`` does not exist.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        *,
        code_paths: Sequence[str] = (),
        accept_arithmetic: bool = False,
        require_box: bool = False,
    ) -> None:
        for name, number in (
            ("num_workers", num_workers),
            ("timeout_s", timeout_s),
            ("memory_mb", memory_mb),
        ):
            if not number > 0:
                raise ValueError(f"GraderPool: {name} = {number}: expected a positive number")
        self._timeout_s = timeout_s
        self._accept_arithmetic, self._require_box = accept_arithmetic, require_box
        environment = _environment(code_paths)
        self._idle: queue.Queue[_Process] = queue.Queue()
        self._idle_for_users: queue.Queue[_Process] = queue.Queue()
        for _ in range(num_workers):
            self._idle.put(_Process(memory_mb, environment, runs_user_code=False))
            self._idle_for_users.put(_Process(memory_mb, environment, runs_user_code=True))
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")

    @classmethod
    def from_config(cls, rewards: RewardsConfig, num_workers: int | None = None) -> GraderPool:
        """Return the pool of ``rewards``; ``num_workers`` None: `processes_per_worker`. Raises as above."""
        return cls(
            rewards.processes_per_worker if num_workers is None else num_workers,
            timeout_s=rewards.timeout_s,
            memory_mb=rewards.memory_mb,
            code_paths=rewards.code_paths,
            accept_arithmetic=rewards.accept_arithmetic,
            require_box=rewards.require_box,
        )

    def grade(self, pairs: list[tuple[str, str]]) -> list[Grade]:
        """Grade (completion, gold answer) pairs, in order. Never raises for a pair, however malformed."""
        return list(self._threads.map(self._grade_one, pairs))

    def extract(self, completions: Iterable[str]) -> list[str | None]:
        """Return the answers that `grade` would compare, in order; None without an answer or on timeout."""
        results = self._threads.map(lambda text: self._run("extract", (text, self._require_box)), completions)
        return [None if isinstance(result, Failure) else result for result in results]

    def call(
        self,
        function: str,
        keywords: Iterable[Mapping[str, Any]],
        sizes: Sequence[int] | None = None,
        *,
        together: bool = False,
    ) -> list[Any]:
        """Call ``module:function`` with each set of keywords, in order. Returns a float per call, NaN for
        None, or a Failure. The function gets only the keywords that it accepts.

        Args:
            sizes: how many numbers each call returns; results are then lists of floats, and a call's deadline
                is the sum of its numbers' deadlines.
            together: await an asynchronous function with all keywords concurrently in one process, each
                within its deadline; if the process dies, each call is repeated separately. Otherwise calls
                are spread over the processes.
        """
        calls = [dict(k) for k in keywords]
        expected = [None] * len(calls) if sizes is None else sizes
        limits = [max(1, size or 1) * self._timeout_s for size in expected]

        def run(part: slice) -> list[Any]:
            longest = max(limits[part]) + (_TOGETHER_S if together else 0.0)
            result = self._run("call", (function, calls[part], limits[part], expected[part]), longest)
            if isinstance(result, Died) and len(calls[part]) > 1:  # one of the calls killed it
                return [run(slice(i, i + 1))[0] for i in range(len(calls))]
            if isinstance(result, Failure):  # the process was shared, so no other call has a result
                return [result] * len(calls[part])
            try:
                return [
                    _result(status, value, size)
                    for (status, value), size in zip(result, expected[part], strict=True)
                ]
            except (TypeError, ValueError):  # not a grader's reply
                return [Failure("error", _FORGED)] * len(calls[part])

        parts = [slice(None)] if together else [slice(i, i + 1) for i in range(len(calls))]
        return [result for results in self._threads.map(run, parts) for result in results]

    def check(self, function: str) -> Signature:
        """Return the signature of ``module:function``. Raises ValueError if it cannot be loaded."""
        result = self._run("load", (function,))
        if isinstance(result, Failure):
            raise ValueError(
                f"reward function {function!r}: {result.detail.removeprefix('ValueError: ')}; expected "
                "`module:function` that can be imported (add its directory to code_paths)"
            )

        return Signature(frozenset(result["names"]), frozenset(result["required"]), result["is_async"])

    def close(self) -> None:
        """End every process once running calls are done. Safe to call twice."""
        self._threads.shutdown(cancel_futures=True)
        for idle in (self._idle, self._idle_for_users):
            while not idle.empty():
                idle.get_nowait().close()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _grade_one(self, pair: tuple[str, str]) -> Grade:
        kinds = [type(p).__name__ for p in pair] if isinstance(pair, tuple | list) else type(pair).__name__
        if kinds != ["str", "str"]:
            return Grade.from_outcome("error", f"expected a pair of strings, got {kinds}")
        result = self._run("grade", (*pair, self._accept_arithmetic, self._require_box))
        if isinstance(result, Failure):
            return Grade.from_outcome("timeout" if result.outcome == "timeout" else "error", result.detail)
        return Grade.from_outcome(*result)

    def _run(self, kind: str, arguments: tuple[Any, ...], timeout_s: float | None = None) -> Any:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        is_user_code = kind in _USER_CODE and not arguments[0].startswith("grpo_dist.")
        idle = self._idle_for_users if is_user_code else self._idle
        try:
            # Bounds the time until a process is free: start, import, call, and at worst kill and restart.
            process = idle.get(timeout=_ATTEMPTS * (3 * _START_S + _BUSY * timeout_s + _KILLED_S))
        except queue.Empty:
            return Failure("error", "no grader process became free")
        try:
            for _ in range(_ATTEMPTS):
                result = process.run(kind, arguments, timeout_s)
                if not isinstance(result, Died):
                    break
            return result
        finally:
            idle.put(process)  # bounded: a queue without a limit


class _Process:
    """One grader process, restarted after a kill, a crash or `_TASKS_PER_PROCESS` calls.

    A process for built-in graders starts at once; a process that ``runs_user_code`` starts on first use.
    """

    def __init__(self, memory_mb: int, environment: dict[str, str], *, runs_user_code: bool) -> None:
        self._memory_mb, self._environment = memory_mb, environment
        self._runs_user_code = runs_user_code
        self._child: subprocess.Popen[bytes] | None = None
        if not runs_user_code:
            self._launch()

    def run(self, kind: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """Run one request. Returns the result or a Failure."""
        try:
            packed = pickle.dumps(arguments)
        except Exception as error:
            return Failure("error", f"cannot be sent to a grader process ({type(error).__name__}: {error})")
        try:
            self._prepare()
            if kind == "load" or (kind in _USER_CODE and arguments[0] not in self._loaded):
                status, value = self._ask("load", pickle.dumps(arguments[:1]), _START_S)
                if status == "ok":
                    self._loaded.add(arguments[0])
                if status != "ok" or kind == "load":
                    return value if status == "ok" else Failure("error", value)
            self._tasks += 1
            status, value = self._ask(kind, packed, timeout_s)
        except TimeoutError:
            self.kill()
            return Failure("timeout", f"no result within {timeout_s:g} s")
        except (OSError, EOFError, ValueError) as error:
            self.kill()
            return Died("error", f"the grader process died ({error})")
        if status == "memory":  # its heap is too full for the next answer
            self.kill()
        return value if status == "ok" else Failure("error", value)

    def close(self) -> None:
        """End the process and its descendants by closing the lifeline, as the end of this process would."""
        if self._child is not None:
            self._lifeline.close()
            self._end()

    def kill(self) -> None:
        """Like `close`, by a signal. Signals once, because the process id may be reused."""
        if self._child is not None:
            if self._child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._child.pid, signal.SIGTERM)
            self._end()

    def _end(self) -> None:
        """Wait until the guardian has killed its descendants and exited; kill them if it cannot."""
        child, self._child = self._child, None
        assert child is not None
        status = _exit_status(child)
        if status is None:
            kill_descendants(child.pid)
            child.kill()
            _exit_status(child)
        if status in (None, -signal.SIGKILL):  # the guardian was killed, by us or by user code
            kill_marked(f"{_MARK}={self._mark}")
        for end in (child.stdin, child.stdout, self._lifeline):
            if end is not None:
                end.close()

    def _launch(self) -> None:
        self._mark = secrets.token_hex(16)
        read_end, write_end = os.pipe()
        self._lifeline = os.fdopen(write_end, "wb", buffering=0)
        command = child_command(
            "grpo_dist.rewards.child", self._memory_mb, read_end, int(self._runs_user_code)
        )
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=self._environment | {_MARK: self._mark},
                pass_fds=(read_end,),
                start_new_session=True,  # only the driver handles an interrupt at the terminal
            )
        finally:
            os.close(read_end)
        assert self._child.stdin is not None and self._child.stdout is not None
        self._input, self._output = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._input, False)
        self._tasks, self._ready, self._buffer = 0, False, b""
        self._loaded: set[str] = set()

    def _prepare(self) -> None:
        """Ensure that the process is running and ready for a request."""
        if self._child is None or self._tasks >= _TASKS_PER_PROCESS or self._child.poll() is not None:
            self.kill()
            self._launch()
        if not self._ready:
            try:
                ready = self._line(time.monotonic() + _START_S)
                if not isinstance(ready, list) or len(ready) != 3 or ready[0] != "ready":
                    raise ValueError("it sent no ready message")
                _, self._pid, self._cpu_s = ready
            except TimeoutError as error:
                raise EOFError(f"not started within {_START_S:g} s") from error
            self._ready = True

    def _ask(self, kind: str, arguments: bytes, seconds: float) -> tuple[str, Any]:
        """Send one request. Returns status and value.

        Raises TimeoutError, EOFError if the process ended, ValueError for a line that is no reply.
        """
        number = secrets.token_hex(16)
        rest = memoryview(pickle.dumps((number, kind, arguments)))
        end = time.monotonic() + seconds
        while rest:
            if not _ready(self._input, select.POLLOUT, end):
                raise TimeoutError
            rest = rest[os.write(self._input, rest[: 1 << 16]) :]
        cpu_s = 0.0 if kind in _USER_CODE else seconds
        reply = self._line(end, cpu_s)
        if reply == IMPORTING and not self._runs_user_code:
            self._line(time.monotonic() + _START_S)
            reply = self._line(time.monotonic() + seconds, cpu_s)
        if not isinstance(reply, list) or len(reply) != 4 or reply[0] != number:
            raise ValueError(_FORGED)
        self._cpu_s = reply[3]
        return reply[1], reply[2]

    def _used_cpu(self) -> float:
        """Return CPU seconds of the process since its last reply; infinity if it has ended."""
        try:
            used = psutil.Process(self._pid).cpu_times()
        except psutil.NoSuchProcess:
            return math.inf
        return used.user + used.system - self._cpu_s

    def _line(self, end: float, cpu_s: float = 0.0) -> Any:
        """Read and parse the next line. Raises TimeoutError, or EOFError if the process ended.

        The math grader only computes: on a busy machine it has ``cpu_s`` seconds of CPU, and at most `_BUSY`
        times as much wall clock.
        """
        last = end + (_BUSY - 1) * cpu_s
        while b"\n" not in self._buffer:
            if not _ready(self._output, select.POLLIN, end):
                left = min(cpu_s - self._used_cpu(), last - time.monotonic()) if cpu_s else 0.0
                if left <= 0:
                    raise TimeoutError
                end = time.monotonic() + left
                continue
            piece = os.read(self._output, 1 << 16)
            if not piece:
                assert self._child is not None
                raise EOFError(f"exit status {_exit_status(self._child)}")
            self._buffer += piece
            if len(self._buffer) > _LONGEST_REPLY:
                raise ValueError(f"it wrote more than {_LONGEST_REPLY} bytes")
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def processes_for(answers: int) -> int:
    """Return how many grader processes to start on this machine for ``answers``, at least 1."""
    return max(1, min(available_cpus(), _MOST_PROCESSES, answers))


def _ready(descriptor: int, event: int, end: float) -> bool:
    """Wait for ``event``, or a hang-up, until ``end``, by `time.monotonic`. Return whether it came."""
    poller = select.poll()  # `select.select` refuses descriptors from 1024 on
    poller.register(descriptor, event)
    return bool(poller.poll(min(1000.0 * max(0.0, end - time.monotonic()), _LONGEST_POLL_MS)))


def _result(status: str, value: Any, size: int | None) -> float | list[float] | Failure:
    """Return the number or the ``size`` numbers of a call, NaN for None, or why it failed.

    Raises TypeError or ValueError for a malformed reply.
    """
    if status != "ok":
        return Failure("timeout" if status == "timeout" else "error", str(value))
    if size is None:
        return math.nan if value is None else float(value)
    if len(value) != size:
        raise ValueError("numbers are missing")
    return [math.nan if number is None else float(number) for number in value]


def _exit_status(child: subprocess.Popen[bytes]) -> int | None:
    """Wait for the exit status; None if the process is still alive after `_KILLED_S`."""
    with suppress(subprocess.TimeoutExpired):
        return child.wait(_KILLED_S)
    return None


def _environment(code_paths: Sequence[str]) -> dict[str, str]:
    directories = code_directories("code_paths", code_paths, "custom rewards")
    return os.environ | {
        "PYTHONPATH": python_path(directories),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
