"""Waiting for several coroutines at once, and deadlines that name their stage."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from grpo_dist.errors import SamplesLost

logger = logging.getLogger("grpo_dist")

T = TypeVar("T")

_ASK_S = 0.2  # between two checks whether to stop waiting


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A group of tasks, which may create further ones; ends when all are done. The first failure cancels the
    others and is raised itself, not in a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__


async def gather(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results in order. Fails as `task_group` does."""
    async with task_group() as group:
        tasks = [group.create_task(c) for c in coroutines]
    return [task.result() for task in tasks]  # bounded: they are done


def in_thread(function: Callable[[], T]) -> Awaitable[T]:
    """Run ``function`` in a daemon thread, which the end of the program does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()  # it can no longer be cancelled, so setting a result succeeds
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)


@asynccontextmanager
async def deadline(
    seconds: float, stage: str, *, explain: Callable[[], Awaitable[str]] | None = None
) -> AsyncIterator[None]:
    """Raise TimeoutError naming ``stage`` when the body takes longer than ``seconds``. The lines after the
    first are what ``explain`` then returns. A TimeoutError of the body passes unchanged.
    """
    async with progressing(seconds, stage, explain=explain):
        yield


@asynccontextmanager
async def progressing(
    seconds: float, stage: str, *, explain: Callable[[], Awaitable[str]] | None = None
) -> AsyncIterator[Callable[[], None]]:
    """A `deadline` for each step of the body. The body calls the yielded function after each step."""
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield lambda: timeout.reschedule(asyncio.get_running_loop().time() + seconds)
    except TimeoutError as error:
        if timeout.expired():
            late = f"stage {stage}: not finished within {seconds:g} s"
            raise TimeoutError(f"{late}\n{await explain()}" if explain else late) from error
        raise


async def finished_unless_stopped(task: asyncio.Task[Any], stop_requested: Callable[[], bool]) -> bool:
    """Wait for ``task``. Returns false, and leaves it running, as soon as ``stop_requested`` is true. The
    caller holds the deadline.
    """
    while not task.done():
        await asyncio.wait([task], timeout=_ASK_S)
        if stop_requested() and not task.done():
            return False
    return True


async def unless_stopped(work: Coroutine[Any, Any, T], stop_requested: Callable[[], bool]) -> T | None:
    """Return the result of ``work``. Cancels it and returns None as soon as ``stop_requested`` is true."""
    task = asyncio.create_task(work)
    try:
        done = await finished_unless_stopped(task, stop_requested)
        return task.result() if done else None  # bounded: it is done
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def sampled_again(attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of ``attempt``, which samples. Repeats it where samples are lost before all readers
    have them: the same seeds give the same samples. The caller holds the deadline.
    """
    while True:
        try:
            return await attempt()
        except SamplesLost as error:
            logger.warning("samples are lost and sampled again: %s", error)
