"""Time limits of tests. They end a hang; even a machine that is twenty times slower stays below them.

HANG_S               limit for operations that take seconds on a quiet machine
wait_until           waits for a condition
wait_for_end         waits for a process as long as it makes progress
longer               deadlines for a part that must time out after others were in time
cpu_s                limits the CPU time of a computation, which other processes do not affect
in_time              repeats grading with longer deadlines until plain answers meet them
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

HANG_S = 1200.0  # below pytest's limit (pyproject.toml), so that the message names the hang
_POLL_S = 0.05
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str | Callable[[], str], *, hang_s: float = HANG_S) -> T:
    """Wait for ``condition`` and return its value. Raises AssertionError with ``what`` after ``hang_s``."""
    end = time.monotonic() + hang_s
    while not (value := condition()):
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(_POLL_S)
    return value


def wait_for_end(process: subprocess.Popen, progress: Callable[[], object], *, hang_s: float = HANG_S) -> int:
    """Wait for ``process`` and return its exit code.

    Raises AssertionError if ``progress()``, e.g. the number of finished steps, is unchanged for ``hang_s``.
    """
    last, since = progress(), time.monotonic()
    while (code := process.poll()) is None:
        time.sleep(_POLL_S)
        if (now := progress()) != last:
            last, since = now, time.monotonic()
        assert time.monotonic() - since < hang_s, f"no progress for {hang_s:g} s: {last!r}"
    return code


def longer(first_s: float) -> tuple[float, ...]:
    """Return ``first_s`` and longer deadlines, s, for a loop that repeats a scenario in which one part must
    miss its deadline. Leave the loop once the other parts were in time; otherwise the machine was busy.
    """
    return first_s, 10 * first_s, 100 * first_s


@contextmanager
def cpu_s(most: float) -> Iterator[None]:
    """Assert that this thread uses at most ``most`` seconds of CPU within."""
    begin = time.thread_time()
    yield
    took = time.thread_time() - begin
    assert took < most, f"took {took:.1f} s of CPU, expected {most:g} s at most"


def in_time(pool: Any, run: Callable[[], T], plain: Callable[[T], Iterable[Any]]) -> T:
    """Return ``run()``, which uses the `GraderPool` ``pool``. Rerun with a longer deadline if a result that
    ``plain`` selects timed out: these take almost no time, so the machine was busy.
    """
    timeout_s = pool._timeout_s
    try:
        for _ in range(3):
            results = run()
            if not any(getattr(result, "outcome", result) == "timeout" for result in plain(results)):
                break
            pool._timeout_s *= 10
        return results
    finally:
        pool._timeout_s = timeout_s
