"""Calls to actors from the driver: many at once, beside their work, and the last one that ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from grpo_dist.errors import cause_of
from grpo_dist.runtime.concurrency import gather

# How Ray says that an actor is gone. Memory: of its node, whose monitor has killed it.
LOST = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)
BESIDE = "beside"  # concurrency group of calls that do not wait for an actor's work
_CLOSE_S = 30.0  # an actor that has not closed by then, or never came up, is killed as it is


async def results(refs: Iterable[Any]) -> list[Any]:
    """Values of object references, in order; the first failure is raised at once."""
    return await gather(result(ref) for ref in refs)


async def result(ref: Any) -> Any:
    """A coroutine of an object reference, which is only awaitable."""
    return await ref


def one_at_a_time(worker: type) -> Any:
    """An actor class whose calls wait for each other, in order, but for those in the group `BESIDE`; with
    `max_concurrency` in its options so many run at once.
    """
    return ray.remote(concurrency_groups={BESIDE: 1})(worker)


async def on_one_host(workers: Iterable[Any]) -> bool:
    """Whether all ``workers`` are on the same node."""
    nodes = await results(
        worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for worker in workers
    )
    return len(set(nodes)) == 1


async def end(workers: Sequence[Any]) -> None:
    """Ask each worker to `close`, for half a minute at most, then kill it. Never raises for a worker's
    sake.
    """
    closing = asyncio.gather(*(result(worker.close.remote()) for worker in workers), return_exceptions=True)
    try:
        await asyncio.wait_for(closing, _CLOSE_S)
    except TimeoutError:
        pass  # killed all the same
    finally:
        kill(workers)


def kill(workers: Sequence[Any]) -> None:
    """End each worker as it is: one that holds nothing which has to be given back."""
    for worker in workers:
        ray.kill(worker)


def reason(error: BaseException) -> str:
    """The first line of what ``error`` says; Ray adds a page."""
    error = cause_of(error)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def where_stuck_in(error: BaseException) -> str:
    """The lines after that one, of an error that says where an actor hangs."""
    _, newline, where = str(error).partition("\n")
    return newline + where if type(error) is TimeoutError else ""
