"""An event loop without real waiting: its clock jumps to the next timer when nothing is ready.

    run_virtually(lambda: asyncio.sleep(3600))     returns at once, an hour later by the loop's clock

The loop waits for threads in real time while its clock stands still.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now, self.threads = 0.0, 0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Any, *arguments: Any
    ) -> Any:
        future = super().run_in_executor(executor, function, *arguments)
        self.threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        self.threads += 1  # the executor starts a thread to wait for the others
        try:
            await super().shutdown_default_executor(*arguments)
        finally:
            self.threads -= 1

    def _thread_done(self, future: Any) -> None:
        self.threads -= 1


class _Jumping(selectors.DefaultSelector):
    """Jumps instead of waiting, unless a thread is running."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if self._loop.threads and timeout != 0:
            return super().select(None)  # bounded: the end of a thread wakes the loop
        if timeout is None:
            raise RuntimeError("the simulation is deadlocked: all its tasks wait for each other")
        self._loop.jump(max(timeout, 0.0))
        return []  # only threads cause events


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` from time 0 on a new loop and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())
