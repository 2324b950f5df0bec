"""Calls from the driver to actors: many at once, in parallel to their work, and the last one that ends
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from grpo_dist.errors import SamplesLost, cause_of
from grpo_dist.runtime.concurrency import gather

# Ray's errors for an actor that is gone. OutOfMemoryError: the memory monitor of its node killed it.
LOST = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)
PARALLEL = "parallel"  # concurrency group of calls that do not wait for an actor's work
_CLOSE_S = 30.0  # an actor that has not closed by then, or never started, is killed


async def results(refs: Iterable[Any]) -> list[Any]:
    """Return the values of object references, in order; raise the first failure at once."""
    return await gather(result(ref) for ref in refs)


async def result(ref: Any) -> Any:
    """Await an object reference, as a coroutine."""
    return await ref


async def fetched(samples: Any) -> Any:
    """Return the samples behind an object reference. Raises SamplesLost where their node is lost."""
    try:
        return await samples
    except ObjectLostError as error:
        raise SamplesLost(reason(error)) from error


def one_at_a_time(worker: type) -> Any:
    """Return an actor class whose calls run one at a time, in order, except those in the group `PARALLEL`.

    `max_concurrency` in its options raises the number of calls that run at once.
    """
    return ray.remote(concurrency_groups={PARALLEL: 1})(worker)


async def nodes_of(workers: Iterable[Any]) -> list[str]:
    """Return the node of each worker, by Ray's id."""
    return await results(
        worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for worker in workers
    )


async def on_one_host(workers: Iterable[Any]) -> bool:
    """Return whether all ``workers`` are on the same node."""
    return len(set(await nodes_of(workers))) == 1


async def end(workers: Sequence[Any]) -> None:
    """Ask each worker to `close`, for half a minute at most, then kill it. Errors of workers are ignored."""
    closing = asyncio.gather(*(result(worker.close.remote()) for worker in workers), return_exceptions=True)
    try:
        await asyncio.wait_for(closing, _CLOSE_S)
    except TimeoutError:
        pass  # killed below
    finally:
        kill(workers)


def kill(workers: Sequence[Any]) -> None:
    """Kill each worker; for workers that hold nothing to release."""
    for worker in workers:
        ray.kill(worker)


def reason(error: BaseException) -> str:
    """Return the first line of the message of ``error``; Ray adds a page."""
    error = cause_of(error)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def where_stuck_in(error: BaseException) -> str:
    """Return the further lines of a TimeoutError that names where an actor hangs."""
    _, newline, where = str(error).partition("\n")
    return newline + where if type(error) is TimeoutError else ""
