"""Work beside the loop: a thread that does what it is handed, in order, and tells of its failures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Background:
    """At most ``pending`` pieces of work wait; whoever hands in more is held up until one is done.

    The first failure is raised, as it was, by the next call of any method; what was handed in after it is not
    done.
    """

    def __init__(self, name: str, *, pending: int) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(pending)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._raise_failure()
        self._work.put(work)

    def flush(self) -> None:
        """Returns once everything handed in is done."""
        self._work.join()
        self._raise_failure()

    def close(self) -> None:
        """`flush`, and the end of the thread."""
        self._work.put(None)
        self._thread.join()
        self._raise_failure()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if self._failure is None:
                    work()
            except BaseException as failure:  # raised where the work came from
                self._failure = failure
            self._work.task_done()
        self._work.task_done()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
