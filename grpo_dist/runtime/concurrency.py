"""Gather coroutines, deadlines that name their stage, an event loop on a thread, a background thread that
reports its failures, and a restart budget.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_dist.errors import SamplesFailed, SamplesLost, find_cause

if TYPE_CHECKING:  # imports pydantic
    from grpo_dist.config import RestartsConfig

logger = logging.getLogger("grpo_dist")

T = TypeVar("T")

_ASK_S = 0.2  # interval of checks whether to stop waiting
_DEADLINE_S = 600.0  # limit for the disk to accept a thread's writes
_LONGEST_S = 60.0
_DOUBLINGS = 64  # limit: 2 to the power of a thousand restarts would overflow
_DRAWS = 3  # attempts for a group whose samples fail: one failure may be bad luck


class LoopThread:
    """An event loop on a separate thread, for callers without one."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop(self, within_s: float) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(within_s)


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Run a group of tasks, which may create more; exit when all are done. The first failure cancels the
    others and is raised as it is, not in an exception group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__


async def gather(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results in order. Fails like `task_group`."""
    async with task_group() as group:
        tasks = [group.create_task(c) for c in coroutines]
    return [task.result() for task in tasks]  # bounded: they are done


def run_in_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Run ``function`` in a daemon thread, which does not delay the program's exit."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # can no longer be cancelled, so setting a result succeeds
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)


@asynccontextmanager
async def deadline(
    seconds: float, stage: str, *, explain: Callable[[], Awaitable[str]] | None = None
) -> AsyncIterator[Callable[[], None]]:
    """Raise TimeoutError naming ``stage`` if the body takes longer than ``seconds``. The yielded function
    restarts the deadline. ``explain`` returns further lines for the message. A TimeoutError of the body
    passes unchanged.
    """
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield lambda: timeout.reschedule(asyncio.get_running_loop().time() + seconds)
    except TimeoutError as error:
        if timeout.expired():
            late = f"stage {stage}: not finished within {seconds:g} s"
            raise TimeoutError(f"{late}\n{await explain()}" if explain else late) from error
        raise


async def wait_unless_stopped(task: asyncio.Task[Any], stop_requested: Callable[[], bool]) -> bool:
    """Wait for ``task``. Returns False, and leaves it running, as soon as ``stop_requested`` is true. The
    caller sets the deadline.
    """
    while not task.done():
        await asyncio.wait([task], timeout=_ASK_S)
        if stop_requested() and not task.done():
            return False
    return True


async def run_unless_stopped(work: Coroutine[Any, Any, T], stop_requested: Callable[[], bool]) -> T | None:
    """Return the result of ``work``. Cancels it and returns None as soon as ``stop_requested`` is true."""
    task = asyncio.create_task(work)
    try:
        done = await wait_unless_stopped(task, stop_requested)
        return task.result() if done else None  # bounded: it is done
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def retry_lost_samples(attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``attempt``, which samples. Repeats it if samples are lost before all readers have
    them: the same seeds give the same samples. The caller sets the deadline.
    """
    while True:
        try:
            return await attempt()
        except SamplesLost as error:
            logger.warning("samples are lost and sampled again: %s", error)


class Background:
    """A thread with a queue of at most ``pending`` work items; `submit` blocks while the queue is full.

    After a failure, the next call of any method raises it unchanged, and later work is skipped.
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
        """Wait until all submitted work is done. Raises TimeoutError if the disk is too slow."""
        self._flush(_DEADLINE_S)

    def is_idle(self) -> bool:
        """Return whether all submitted work is done."""
        self._raise_failure()
        return not self._work.unfinished_tasks

    def close(self) -> None:
        """Flush and end the thread. If the disk blocks, the thread is abandoned: it is a daemon."""
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


WINDOW_S = 3600.0  # older restarts do not count: one failure per hour is acceptable


class Budget:
    """The restart budget of one actor or of a whole role. ``settings`` None: no restarts."""

    def __init__(
        self, settings: RestartsConfig | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._clock = settings, clock
        self._recent: deque[float] = deque()
        self.used = 0  # total restarts

    def take(self) -> float | None:
        """Use one restart. Returns the seconds to wait before it, or None if no restart is left."""
        if self._settings is None:
            return None
        now = self._clock()
        while self._recent and now - self._recent[0] > WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._settings.max_per_worker:
            return None
        self._recent.append(now)
        self.used += 1
        doubled = min(len(self._recent) - 1, _DOUBLINGS)
        return float(min(self._settings.backoff_s * 2**doubled, _LONGEST_S))

    def __str__(self) -> str:
        """Describe the last restart, e.g. "restart 2 of 3"."""
        allowed = self._settings.max_per_worker if self._settings else 0
        return f"restart {len(self._recent)} of {allowed}"

    @property
    def spent(self) -> str:
        """Explain why no restart is left, as a suffix of a failure; "" if restarts were never allowed."""
        if self._settings is None or not self._recent:
            return ""
        return (
            f" after {len(self._recent)} restart(s) within an hour, all of `cluster.restarts.max_per_worker`"
        )


async def sample_until_enough(
    sample: Callable[[Sequence[int]], Awaitable[T]], seeds: Callable[[int], Sequence[int]], *, least: int
) -> T:
    """Return the result of ``sample`` with the seeds of draw 0, ``seeds(0)``. The caller sets the deadline.

    Samples that are lost before all readers have them are resampled with the same seeds. If engines give
    fewer than ``least``, tries the seeds of draw 1, then of draw 2. Raises SamplesFailed after that.
    """
    draw = 0
    while True:
        try:
            return await retry_lost_samples(partial(sample, seeds(draw)))
        except SamplesFailed as error:
            minimum, draw = f"{least}, half of `batch.samples_per_prompt`", draw + 1
            if draw == _DRAWS:
                raise SamplesFailed(
                    f"{find_cause(error)}; the last of {_DRAWS} draws, expected at least {minimum}. See the "
                    "logs of the engines"
                ) from error
            logger.warning("%s, expected at least %s; resampling the group", find_cause(error), minimum)
