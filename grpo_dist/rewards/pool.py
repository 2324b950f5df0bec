"""Grading in processes that can be killed: a hard deadline per answer, whatever the answer does to a parser.

grade() threads      one each     grader processes
    pair  ---------- pickle ---->  parse, compare       reply in time: done, the process takes the next pair
          <--------- JSON -------
                                   no reply in time, or dead: SIGKILL, a new process; this pair alone is lost
"""

from __future__ import annotations

import json
import math
import os
import pickle
import queue
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.rewards.math import Grade

_START_S = 120.0  # a new process has imported the parsers by then, also on a busy machine
_TASKS_PER_PROCESS = 2000  # parsers keep caches; a process is replaced before they matter
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that gave no value: ``timeout`` or ``error``."""

    outcome: str
    detail: str


class GraderPool:
    """``num_workers`` grader processes shared by any number of calling threads. Use as a context manager, or
    `close`.

    Args:
        timeout_s: longest an answer may take, seconds of wall clock.
        memory_mb: address space a process may take beyond what it holds once started.
        code_paths: directories where custom reward functions are found.
    """

    def __init__(
        self,
        num_workers: int,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        *,
        code_paths: Sequence[str] = (),
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers = {num_workers}: a grader pool needs at least one process")
        self._timeout_s = timeout_s
        start = [sys.executable, "-m", "grpo_dist.rewards.child", str(memory_mb)]
        environment = _environment(code_paths)
        self._idle: queue.Queue[_Process] = queue.Queue()
        for _ in range(num_workers):
            self._idle.put(_Process(start, environment))
        self._size = num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grader")

    def grade(self, pairs: list[tuple[str, str]]) -> list[Grade]:
        """Grades of (completion, gold answer) pairs, in order. Never raises for a pair, however malformed."""
        return list(self._threads.map(self._grade_one, pairs))

    def call(self, function: str, keywords: Iterable[Mapping[str, Any]]) -> list[float | Failure]:
        """Values of ``module:function`` for each set of keywords, in order; a Failure where there is none."""
        tasks = [(function, dict(k)) for k in keywords]
        return list(self._threads.map(lambda task: _value(self._run("call", task)), tasks))

    def check(self, function: str) -> None:
        """Raises ValueError when ``module:function`` cannot be loaded."""
        result = self._run("check", (function,))
        if isinstance(result, Failure):
            raise ValueError(
                f"reward function {function!r}: {result.detail.removeprefix('ValueError: ')}; expected "
                f"`module:function` "
                "that can be imported (add its directory to rewards.code_paths)"
            )

    def close(self) -> None:
        """Ends every process. Safe to call twice."""
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
            return Grade.of("error", f"expected a pair of texts, got {pair!r}"[:200])
        result = self._run("grade", tuple(pair))
        if isinstance(result, Failure):
            return Grade.of("timeout" if result.outcome == "timeout" else "error", result.detail)
        return Grade.of(result[0], result[1])

    def _run(self, kind: str, arguments: tuple[Any, ...]) -> Any:
        process = self._idle.get()
        try:
            return process.run(kind, arguments, self._timeout_s)
        finally:
            self._idle.put(process)


class _Process:
    """One grader process; started anew after it was killed, had died or has done enough."""

    def __init__(self, start: list[str], environment: dict[str, str]) -> None:
        self._start, self._environment = start, environment
        self._launch()

    def run(self, kind: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            request = pickle.dumps((kind, timeout_s, arguments))
        except Exception as error:
            return Failure("error", f"cannot be sent to a grader process ({type(error).__name__}: {error})")
        if self._tasks >= _TASKS_PER_PROCESS or self._child.poll() is not None:
            self._relaunch()
        try:
            self._wait_until_ready()
            self._tasks += 1
            self._input.write(request)
            self._input.flush()
            status, value = self._reply(timeout_s)
        except TimeoutError:
            self._relaunch()
            return Failure("timeout", f"no result within {timeout_s:g} s")
        except (OSError, EOFError, ValueError) as error:
            self._relaunch()
            return Failure("error", f"the grader process died ({error})")
        return value if status == "ok" else Failure("error", value)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what a dead process had not read
                    continue

    def _launch(self) -> None:
        self._child = subprocess.Popen(
            self._start,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,  # an interrupt at the terminal is for the driver, which closes the pool
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._input, self._output = self._child.stdin, self._child.stdout
        self._tasks, self._ready, self._buffer = 0, False, b""

    def _relaunch(self) -> None:
        self.kill()
        self._launch()

    def _wait_until_ready(self) -> None:
        if not self._ready:
            try:
                self._reply(_START_S)
            except TimeoutError as error:
                raise EOFError(f"not started within {_START_S:g} s") from error
            self._ready = True

    def _reply(self, seconds: float) -> Any:
        """The next line of the process, parsed. Raises TimeoutError, or EOFError when the process ended."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._output], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            piece = os.read(self._output.fileno(), 1 << 16)
            if not piece:
                raise EOFError(f"exit status {self._child.wait()}")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


def _environment(code_paths: Sequence[str]) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    paths = (
        [str(Path(p).expanduser().resolve()) for p in code_paths]
        + [str(_ROOT)]
        + ([inherited] if inherited else [])
    )
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _value(result: Any) -> float | Failure:
    if isinstance(result, Failure):
        return result
    return math.nan if result is None else float(result)
