"""A worker thread that runs submitted work in order and reports its failures."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

_DEADLINE_S = 600.0  # in which a disk must have taken what the thread writes


class Background:
    """A thread with a queue of at most ``pending`` pieces of work; `submit` blocks while the queue is full.

    The next call of any method raises the first failure unchanged. Work submitted after it is skipped.
    """

    def __init__(self, name: str, *, pending: int) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(pending)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._raise_failure()
        try:
            self._work.put(work, timeout=_DEADLINE_S)
        except queue.Full:
            raise self._too_late() from None

    def flush(self) -> None:
        """Wait until all submitted work is done. Raises TimeoutError where the disk does not take it in
        time.
        """
        self._flush(_DEADLINE_S)

    def is_idle(self) -> bool:
        """Return whether all submitted work is done."""
        self._raise_failure()
        return not self._work.unfinished_tasks

    def close(self) -> None:
        """Flush and end the thread. Where the disk takes nothing, the thread is abandoned: it is a daemon."""
        end = time.monotonic() + _DEADLINE_S
        try:
            self._work.put(None, timeout=_DEADLINE_S)
        except queue.Full:
            raise self._too_late() from None
        self._flush(end - time.monotonic())

    def _flush(self, seconds: float) -> None:
        with self._work.all_tasks_done:
            done = self._work.all_tasks_done.wait_for(lambda: not self._work.unfinished_tasks, seconds)
        self._raise_failure()
        if not done:
            raise self._too_late()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:  # bounded: `close` puts None
            try:
                if self._failure is None:
                    work()
            except BaseException as failure:  # the next call raises it
                self._failure = failure
            self._work.task_done()
        self._work.task_done()

    def _too_late(self) -> TimeoutError:
        name = self._thread.name
        return TimeoutError(f"{name}: not done within {_DEADLINE_S:g} s; is the disk full or gone?")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
