"""Grading in processes that can be killed: a hard deadline per answer, whatever the answer does to a parser.

grade() threads      one each     grader processes
    pair  ---------- pickle ---->  parse, compare       reply in time: done, the process takes the next pair
          <--------- JSON -------
                                   no reply in time: SIGKILL, a new process; this pair alone is lost
                                   dead: the same pair again, of a new process; dead again: it is lost
"""

from __future__ import annotations

import json
import math
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.rewards.math import Grade

_START_S = (
    120.0  # a new process has imported the parsers by then, or a module of the user's, also on a busy machine
)
_TASKS_PER_PROCESS = 2000  # parsers keep caches; a process is replaced before they matter
_ATTEMPTS = 2  # whatever ended a process need not have been the answer it was at
_KILLED_S = 10.0  # a killed process is gone by then, unless the kernel holds it; then it is left behind
_ROOT = Path(__file__).resolve().parents[2]
# The process has the grpo_dist of this one, whatever lies in `code_paths`. Where that was found is no place
# for the user's modules: it may be the working directory. Nor is the working directory itself (-P).
_CHILD = (
    "import sys; sys.path.insert(0, sys.argv.pop()); import grpo_dist.rewards.child as child; "
    "del sys.path[0]; child.main()"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that gave no value: ``timeout`` or ``error``."""

    outcome: str
    detail: str


class _Died(Failure):
    """The process ended over the call."""


class GraderPool:
    """``num_workers`` grader processes shared by any number of threads. Use as a context manager, or `close`.

    The processes end with the one that made the pool, however that one ends.

    Args:
        timeout_s: longest an answer may take, seconds of wall clock. Starting a process does not count.
        memory_mb: address space a process may take beyond what it holds once started, MiB.
        code_paths: directories where custom reward functions are found, before the usual ones: PYTHONPATH and
            what is installed. The working directory is none of them unless it is named.

    Raises:
        ValueError: a number that is not positive, or a directory of ``code_paths`` that is not there.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        *,
        code_paths: Sequence[str] = (),
    ) -> None:
        for name, number in (
            ("num_workers", num_workers),
            ("timeout_s", timeout_s),
            ("memory_mb", memory_mb),
        ):
            if not number > 0:
                raise ValueError(f"GraderPool: {name} = {number}: expected a positive number")
        self._timeout_s = timeout_s
        environment = _environment(code_paths)
        self._idle: queue.Queue[_Process] = queue.Queue()
        for _ in range(num_workers):
            self._idle.put(_Process(memory_mb, environment))
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")

    def grade(self, pairs: list[tuple[str, str]]) -> list[Grade]:
        """Grades of (completion, gold answer) pairs, in order. Never raises for a pair, however malformed."""
        return list(self._threads.map(self._grade_one, pairs))

    def find(self, completions: Iterable[str]) -> list[str | None]:
        """The answers that `grade` would compare, in order; None where there is none, or none in time."""
        results = self._threads.map(lambda text: self._run("find", (text,)), completions)
        return [None if isinstance(result, Failure) else result for result in results]

    def call(self, function: str, keywords: Iterable[Mapping[str, Any]]) -> list[float | Failure]:
        """Values of ``module:function`` for each set of keywords, in order; a Failure where there is none.

        The function gets those keywords that it takes. NaN where it returns None or NaN.
        """
        tasks = [(function, dict(k)) for k in keywords]
        return list(self._threads.map(self._call_one, tasks))

    def check(self, function: str) -> None:
        """Raises ValueError when ``module:function`` cannot be loaded."""
        result = self._run("load", (function,))
        if isinstance(result, Failure):
            raise ValueError(
                f"reward function {function!r}: {result.detail.removeprefix('ValueError: ')}; expected "
                "`module:function` that can be imported (add its directory to rewards.code_paths)"
            )

    def close(self) -> None:
        """Ends every process, when those at work are done. Safe to call twice."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get_nowait().kill()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _grade_one(self, pair: tuple[str, str]) -> Grade:
        if not (
            isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        ):
            kinds = (
                [type(part).__name__ for part in pair]
                if isinstance(pair, tuple | list)
                else type(pair).__name__
            )
            return Grade.of("error", f"expected a pair of texts, got {kinds}")
        result = self._run("grade", tuple(pair))
        if isinstance(result, Failure):
            return Grade.of("timeout" if result.outcome == "timeout" else "error", result.detail)
        return Grade.of(result[0], result[1])

    def _call_one(self, task: tuple[str, dict[str, Any]]) -> float | Failure:
        result = self._run("call", task)
        if isinstance(result, Failure):
            return result
        return math.nan if result is None else float(result)

    def _run(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        try:
            # Every process comes back in this time: it is loaded, asked, and at worst killed and replaced.
            process = self._idle.get(timeout=_ATTEMPTS * (3 * _START_S + self._timeout_s + _KILLED_S))
        except queue.Empty:
            return Failure("error", "no grader process came free")
        try:
            for _ in range(_ATTEMPTS):
                result = process.run(kind, arguments, self._timeout_s)
                if not isinstance(result, _Died):
                    break
            return result
        finally:
            self._idle.put(process)


class _Process:
    """One grader process; started anew after it was killed, had died or has done enough."""

    def __init__(self, memory_mb: int, environment: dict[str, str]) -> None:
        self._memory_mb, self._environment, self._killed = memory_mb, environment, False
        self._launch()

    def run(self, kind: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """The result, or a Failure."""
        try:
            request = pickle.dumps((kind, arguments))
        except Exception as error:
            return Failure("error", f"cannot be sent to a grader process ({type(error).__name__}: {error})")
        try:
            self._prepare()
            if kind in ("load", "call") and arguments[0] not in self._loaded:
                status, value = self._ask(pickle.dumps(("load", arguments[:1])), _START_S)
                if status == "ok":
                    self._loaded.add(arguments[0])
                if status != "ok" or kind == "load":
                    return value if status == "ok" else Failure("error", value)
            self._tasks += 1
            status, value = self._ask(request, timeout_s)
        except TimeoutError:
            self.kill()
            return Failure("timeout", f"no result within {timeout_s:g} s")
        except (OSError, EOFError, ValueError) as error:
            self.kill()
            return _Died("error", f"the grader process died ({error})")
        if status == "memory":  # what is left of its heap is no place for the next answer
            self.kill()
        return value if status == "ok" else Failure("error", value)

    def kill(self) -> None:
        """SIGKILL to the process and to those it has started; once, for then its number may be another's."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._exit_status()
        for end in (self._child.stdin, self._child.stdout, self._lifeline):
            if end is not None:
                end.close()

    def _exit_status(self) -> int | None:
        """None when the process is still there after a while."""
        with suppress(subprocess.TimeoutExpired):
            return self._child.wait(_KILLED_S)
        return None

    def _launch(self) -> None:
        held, given = os.pipe()
        self._lifeline = os.fdopen(given, "wb", buffering=0)
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _CHILD, str(self._memory_mb), str(held), str(_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=self._environment,
                pass_fds=(held,),
                start_new_session=True,  # an interrupt at the terminal is for the driver alone
            )
        finally:
            os.close(held)
        assert self._child.stdin is not None and self._child.stdout is not None
        self._input, self._output = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._input, False)
        self._tasks, self._ready, self._killed, self._buffer = 0, False, False, b""
        self._loaded: set[str] = set()

    def _prepare(self) -> None:
        """A process that is up and waits for a request."""
        if self._killed or self._tasks >= _TASKS_PER_PROCESS or self._child.poll() is not None:
            self.kill()
            self._launch()
        if not self._ready:
            try:
                self._reply(time.monotonic() + _START_S)
            except TimeoutError as error:
                raise EOFError(f"not started within {_START_S:g} s") from error
            self._ready = True

    def _ask(self, request: bytes, seconds: float) -> Any:
        end = time.monotonic() + seconds
        rest = memoryview(request)
        while rest:
            _, ready, _ = select.select([], [self._input], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            rest = rest[os.write(self._input, rest[: 1 << 16]) :]
        return self._reply(end)

    def _reply(self, end: float) -> Any:
        """The next line of the process, parsed. Raises TimeoutError, or EOFError when the process ended."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._output], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            piece = os.read(self._output, 1 << 16)
            if not piece:
                raise EOFError(f"exit status {self._exit_status()}")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def _environment(code_paths: Sequence[str]) -> dict[str, str]:
    directories = [Path(path).expanduser().resolve() for path in code_paths]
    for given, directory in zip(code_paths, directories, strict=True):
        if not directory.is_dir():
            raise ValueError(
                f"rewards.code_paths: {given!r} is not a directory (looked at {directory}); expected "
                "directories with the modules of custom rewards"
            )
    # An empty entry, as in "a::b" or "a:", would be the working directory.
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [*map(str, directories), *inherited]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
