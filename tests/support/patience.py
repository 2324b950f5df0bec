"""Limits of tests. They end what hangs; a machine that is busy, and twenty times slower, does not reach them.

HANG_S               for what takes seconds on a quiet machine
wait_until           for a condition, until then
wait_for_end         for a process, which may take as long as it likes while it makes progress
cpu_s                of a computation: what another process takes from it does not count
in_time              for graders with a short deadline, which plain answers must not miss
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

HANG_S = 1200.0  # below pytest's own limit (pyproject.toml), so that what hangs is named
_POLL_S = 0.05
T = TypeVar("T")


def wait_until(
    condition: Callable[[], object], what: str | Callable[[], str], *, hang_s: float = HANG_S
) -> None:
    """Raises AssertionError with ``what`` when ``condition`` is not true within ``hang_s``."""
    end = time.monotonic() + hang_s
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(_POLL_S)


def wait_for_end(process: subprocess.Popen, progress: Callable[[], object], *, hang_s: float = HANG_S) -> int:
    """The exit code of ``process``. Raises AssertionError when it lives and ``progress()``, such as the
    number of its finished steps, has been the same for ``hang_s``.
    """
    seen, since = progress(), time.monotonic()
    while (code := process.poll()) is None:
        time.sleep(_POLL_S)
        if (now := progress()) != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() - since < hang_s, f"no progress for {hang_s:g} s: {seen!r}"
    return code


@contextmanager
def cpu_s(most: float) -> Iterator[None]:
    """Within, this thread computes for ``most`` seconds at most."""
    begin = time.thread_time()
    yield
    took = time.thread_time() - begin
    assert took < most, f"took {took:.1f} s of CPU, expected {most:g} s at most"


def in_time(pool: Any, run: Callable[[], T], plain: Callable[[T], Iterable[Any]]) -> T:
    """What ``run()`` finds with ``pool``, a `GraderPool`; again with a longer deadline when one of the
    results that ``plain`` picks was late: those take next to no time, so the machine is busy.
    """
    given = pool._timeout_s
    try:
        for _ in range(3):
            found = run()
            if not any(getattr(result, "outcome", result) == "timeout" for result in plain(found)):
                break
            pool._timeout_s *= 10
        return found
    finally:
        pool._timeout_s = given
