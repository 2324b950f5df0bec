"""Trackers besides the record, and the thread of its own that each of them has.

    loop     log ----> [ waiting, bounded ] ---->  thread: open, log, log, ..., close
               \
                what cannot wait is dropped and counted

A tracker may raise, or hang, from its first call to its last: the run neither stops nor waits for it. It is
told of once, and at the end how much is missing there; the run's directory has all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from grpo_dist.observe.completions import Table

_PENDING, _TABLES_PENDING = 1000, 8  # that wait; tables are large
_CLOSE_S = 45.0  # for all trackers together, at the end of a run


class Sink(Protocol):
    """Metrics of a step may come in parts."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def table(self, step: int, table: Table) -> None: ...
    def close(self, *, failed: bool) -> None: ...


class AsyncSink:
    """A sink at work in its own thread. All methods but `leave` return at once; ``warn`` is called by them
    alone, never by the thread.
    """

    def __init__(
        self, name: str, open_sink: Callable[[Callable[[str], None]], Sink], warn: Callable[[str], None]
    ) -> None:
        """``open_sink`` is called in the thread; what it has to say goes to what it is given."""
        self._name, self._open, self._warn = name, open_sink, warn
        self._waiting: deque[Callable[[Sink], None]] = deque()
        self._tables = 0  # among them, or being handed over
        self._changed = threading.Condition()
        self._news: list[str] = []
        self._handed_in = self._done = 0
        self._failed: bool | None = None  # of the run; None: it goes on
        self._broken = False  # told of its failure
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        own = dict(metrics)  # the loop goes on with its own
        self._hand_in(lambda sink: sink.log(step, own), full=len(self._waiting) >= _PENDING)

    def table(self, step: int, table: Table) -> None:
        def hand_over(sink: Sink) -> None:
            try:
                sink.table(step, table)
            finally:
                with self._changed:
                    self._tables -= 1

        with self._changed:
            full = self._tables >= _TABLES_PENDING
            self._tables += not full
        self._hand_in(hand_over, full=full)

    def end(self, *, failed: bool) -> None:
        """What waits is still done, then the sink is closed."""
        with self._changed:
            self._failed = failed
            self._changed.notify()

    def leave(self, deadline: float) -> None:
        """Returns when the thread has ended, or at ``deadline`` (`time.monotonic`); says what is missing."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._note(f"it does not end within {_CLOSE_S:g} s, and is left")
        if missing := self._handed_in - self._done:
            self._note(
                f"{missing} of {self._handed_in} records are missing there; the run's directory has all"
            )
        self._tell()

    def _hand_in(self, work: Callable[[Sink], None], *, full: bool) -> None:
        with self._changed:
            self._handed_in += 1
            if self._thread.is_alive() and not full:
                self._waiting.append(work)
                self._changed.notify()
        if full:
            self._complain("it is too slow, or hangs; what it cannot take is dropped")
        self._tell()

    def _run(self) -> None:
        try:
            sink = self._open(self._note)
        except Exception as error:
            self._complain(f"it cannot be started, and the run goes on without: {_said(error)}")
            return
        while (work := self._next()) is not None:
            try:
                work(sink)
                self._done += 1
            except Exception as error:
                self._complain(f"it fails, and what it does not take is dropped: {_said(error)}")
        try:
            sink.close(failed=bool(self._failed))
        except Exception as error:
            self._complain(f"it cannot be closed: {_said(error)}")

    def _next(self) -> Callable[[Sink], None] | None:
        """None: the run is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._failed is not None)  # bounded: `end`
            return self._waiting.popleft() if self._waiting else None

    def _complain(self, what: str) -> None:
        """Of many failures the first is told."""
        if not self._broken:
            self._broken = True
            self._note(what)

    def _note(self, what: str) -> None:
        self._news.append(f"{self._name}: {what}")

    def _tell(self) -> None:
        while self._news:
            self._warn(self._news.pop(0))


def close_all(sinks: Sequence[AsyncSink], *, failed: bool) -> None:
    """Within one deadline for all of them."""
    deadline = time.monotonic() + _CLOSE_S
    for sink in sinks:
        sink.end(failed=failed)
    for sink in sinks:
        sink.leave(deadline)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
