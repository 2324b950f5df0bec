"""Sinks for trackers, each in a thread of its own behind a bounded queue.

    loop     log ----> [ queue, bounded ] ---->  thread: open, log, log, ..., close
               \
                dropped and counted when the queue is full

A tracker may raise or hang in any call: the run neither stops nor waits. The first failure is reported, and
at the end the number of missing records; the run directory has all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from grpo_dist.errors import raised
from grpo_dist.observe.completions import Table

_PENDING, _TABLES_PENDING = 1000, 8  # queued; tables are large
_CLOSE_S = 45.0  # for all trackers together, at the end of a run


class Sink(Protocol):
    """A tracker. Metrics of a step may arrive in parts."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def table(self, step: int, table: Table) -> None: ...
    def close(self, *, failed: bool) -> None: ...


class AsyncSink:
    """A sink in its own thread. All methods but `join` return at once, and only they call ``warn``."""

    def __init__(
        self, name: str, open_sink: Callable[[Callable[[str], None]], Sink], warn: Callable[[str], None]
    ) -> None:
        """Start the thread, which calls ``open_sink`` with a function that reports problems."""
        self._name, self._open, self._warn = name, open_sink, warn
        self._work: SimpleQueue[Callable[[Sink], None] | None] = SimpleQueue()
        self._tables = threading.Semaphore(_TABLES_PENDING)  # not yet queued, nor being written
        self._messages: list[str] = []
        self._submitted = self._done = 0
        self._failed = False  # the run has, at its end
        self._reported: set[str] = set()  # failures that come again with each record
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        copy = dict(metrics)  # the loop may change its own
        self._submit(lambda sink: sink.log(step, copy), full=self._work.qsize() >= _PENDING)

    def table(self, step: int, table: Table) -> None:
        def write(sink: Sink) -> None:
            try:
                sink.table(step, table)
            finally:
                self._tables.release()

        self._submit(write, full=not self._tables.acquire(blocking=False))

    def end(self, *, failed: bool) -> None:
        """Ask the thread to finish its queue and close the sink."""
        self._failed = failed
        self._work.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the thread until ``deadline`` (`time.monotonic`), then report what is missing."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._note(f"did not finish within {_CLOSE_S:g} s and was abandoned")
        if missing := self._submitted - self._done:
            self._note(
                f"{missing} of {self._submitted} records are missing; the run directory has all of them"
            )
        self._deliver()

    def _submit(self, work: Callable[[Sink], None], *, full: bool) -> None:
        self._submitted += 1
        if full:
            self._note_once("too slow or hanging; records that do not fit its queue are dropped")
        elif self._thread.is_alive():
            self._work.put(work)
        self._deliver()

    def _run(self) -> None:
        try:
            sink = self._open(self._note)
        except Exception as error:
            self._note(f"cannot be started; the run continues without it: {raised(error)}")
            return
        while (work := self._work.get()) is not None:  # bounded: `end` puts None
            try:
                work(sink)
                self._done += 1
            except Exception as error:
                self._note_once("failed; records that it refuses are dropped", f": {raised(error)}")
        try:
            sink.close(failed=self._failed)
        except Exception as error:
            self._note(f"cannot be closed: {raised(error)}")

    def _note_once(self, failure: str, reason: str = "") -> None:
        """Report ``failure`` with its first reason, and not again."""
        if failure not in self._reported:
            self._reported.add(failure)
            self._note(failure + reason)

    def _note(self, what: str) -> None:
        self._messages.append(f"{self._name}: {what}")

    def _deliver(self) -> None:
        while self._messages:
            self._warn(self._messages.pop(0))


def close_all(sinks: Sequence[AsyncSink], *, failed: bool) -> None:
    """Close all sinks, within one deadline."""
    deadline = time.monotonic() + _CLOSE_S
    for sink in sinks:
        sink.end(failed=failed)
    for sink in sinks:
        sink.join(deadline)
