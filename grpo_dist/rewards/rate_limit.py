"""At most so many requests a minute, evenly spaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock


class RateLimit:
    """Shared by threads: each `wait` returns at least 60 / ``per_minute`` seconds after the one before.

    Evenly, not in bursts: what a server counts in a window of its own is then never above the limit.
    """

    def __init__(
        self,
        per_minute: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval, self._clock, self._sleep = 60.0 / per_minute, clock, sleep
        self._lock, self._next = Lock(), clock()

    def wait(self) -> None:
        with self._lock:
            now = self._clock()
            turn = max(now, self._next)
            self._next = turn + self._interval
        if turn > now:
            self._sleep(turn - now)
