"""A budget of restarts, with exponential backoff."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from grpo_dist.config import RestartsConfig

_LONGEST_S = 60.0
_DOUBLINGS = 64  # at most: two to the power of a thousand restarts would overflow


class Budget:
    """The restarts of one actor, or of a whole role. With ``settings`` None there are none."""

    def __init__(
        self, settings: RestartsConfig | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self._recent: deque[float] = deque()
        self.used = 0  # in all

    def take(self) -> float | None:
        """Use one restart. Returns the seconds to wait before it, or None when no restart is left."""
        if self._settings is None:
            return None
        now = self._clock()
        while self._recent and now - self._recent[0] > self._settings.window_s:
            self._recent.popleft()
        if len(self._recent) >= self._settings.max_per_worker:
            return None
        self._recent.append(now)
        self.used += 1
        doubled = min(len(self._recent) - 1, _DOUBLINGS)
        return float(min(self._settings.backoff_s * 2**doubled, _LONGEST_S))

    def __str__(self) -> str:
        """Describe the restart last taken, e.g. "restart 2 of 3"."""
        allowed = self._settings.max_per_worker if self._settings else 0
        return f"restart {len(self._recent)} of {allowed}"

    @property
    def spent(self) -> str:
        """Say why no restart is left, to be appended to a failure; "" where none was ever allowed."""
        if self._settings is None or not self._recent:
            return ""
        return (
            f" after {len(self._recent)} restart(s) within {self._settings.window_s:g} s, all of "
            "`cluster.restarts.max_per_worker`"
        )
