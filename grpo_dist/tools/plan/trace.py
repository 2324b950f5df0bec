"""Records what each simulated worker does when, and the processor time that the simulation itself takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from grpo_dist.runtime.metering import Span


class SimulationTrace:
    """The spans of every worker by name (`bars`), on the clock of the running loop."""

    def __init__(self, tracks: Iterable[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.bars: dict[str, list[Span]] = {track: [] for track in tracks}
        self.excluded_s = 0.0  # processor time of the simulated workers

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the processor time of this block from the driver's."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self.excluded_s += time.thread_time() - begin

    @asynccontextmanager
    async def span(self, track: str, stage: str) -> AsyncIterator[None]:
        """Record this block as a span of ``stage``."""
        begin = self._loop.time()
        try:
            yield
        finally:
            self.bars.setdefault(track, []).append(Span(stage, begin, self._loop.time()))
