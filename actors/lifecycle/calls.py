"""Calls to actors from the driver: many at once, beside their work, and the last one that ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)

from grpo_dist.runtime.concurrency import gather

# How Ray says that an actor is gone. Memory: of its node, whose monitor has killed it.
LOST = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)
BESIDE = "beside"  # concurrency group of calls that do not wait for an actor's work
Places = Sequence[dict[str, Any]] | None  # Ray options of each worker of a role on top of those of all
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


def makers(make: Callable[[dict[str, Any], str], Any], places: Places, workers: int) -> list[Any]:
    """Of so many ``workers``, what makes each, given its name: ``make`` with the options of its place."""
    own = [{}] * workers if places is None else list(places)
    assert len(own) == workers, f"{len(own)} places for {workers} workers"
    return [partial(make, place) for place in own]


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
