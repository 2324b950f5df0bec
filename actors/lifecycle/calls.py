"""Call actors from the driver: concurrently, in parallel to their work, with deadlines; and end them.

A deadline's error says where each actor is, on its node and in its code:

    driver                                  node of the actor
      which node, which process? <-- Ray
      where is it? --------------------->   `grpo_dist.runtime.stacks`: state, stacks of all threads
      text of the error <----------------

`Probeable` is the interface of a supervised actor: a health check.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_dist.errors import SamplesLost, find_cause
from grpo_dist.runtime.concurrency import deadline, gather, run_in_thread
from grpo_dist.runtime.stacks import listen, look

# Ray's errors for a lost actor. OutOfMemoryError: its node's memory monitor killed it.
LOST = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)
PARALLEL = "parallel"  # concurrency group for calls that do not wait for an actor's work
_CLOSE_S = 30.0  # then an actor is killed, also one that never started


async def results(refs: Iterable[Any]) -> list[Any]:
    """Return the values of object references in order; raise the first failure at once."""
    return await gather(result(ref) for ref in refs)


async def result(ref: Any) -> Any:
    """Await an object reference, as a coroutine."""
    return await ref


async def fetched(samples: Any) -> Any:
    """Return the samples behind an object reference. Raises SamplesLost if their node is lost."""
    try:
        return await samples
    except ObjectLostError as error:
        raise SamplesLost(reason(error)) from error


def one_at_a_time(worker: type) -> Any:
    """Return an actor class whose calls run one at a time, in order, except calls in the group `PARALLEL`.

    Its option `max_concurrency` lets more calls run at once.
    """
    return ray.remote(concurrency_groups={PARALLEL: 1})(worker)


async def nodes_of(workers: Iterable[Any]) -> list[str]:
    """Return the Ray node id of each worker."""
    return await results(
        worker.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for worker in workers
    )


async def are_on_one_host(workers: Iterable[Any]) -> bool:
    """Return whether all ``workers`` are on the same node."""
    return len(set(await nodes_of(workers))) == 1


async def end(workers: Sequence[Any]) -> None:
    """Ask each worker to `close`, wait up to 30 s, then kill it. Ignores errors of workers."""
    closing = asyncio.gather(*(result(worker.close.remote()) for worker in workers), return_exceptions=True)
    try:
        await asyncio.wait_for(closing, _CLOSE_S)
    except TimeoutError:
        pass  # killed below
    finally:
        kill(workers)


def kill(workers: Sequence[Any]) -> None:
    """Kill each worker; for workers with nothing to release."""
    for worker in workers:
        ray.kill(worker)


def reason(error: BaseException) -> str:
    """Return the first line of the error's message; Ray adds a page."""
    error = find_cause(error)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def where_stuck_in(error: BaseException) -> str:
    """Return the remaining lines of a TimeoutError, which say where an actor hangs."""
    _, newline, where = str(error).partition("\n")
    return newline + where if type(error) is TimeoutError else ""


T = TypeVar("T")

_FIND_S = 2.0  # deadline for reading Ray's actor table
_LOOK_S = 6.0  # deadline for reading stacks: on another node, Ray may have to start a process
_CALLS_S = 2.0  # deadline for listing an event loop's pending calls


def deadline_of(
    workers: Mapping[str, Any], seconds: float, stage: str
) -> AbstractAsyncContextManager[object]:
    """Return a `deadline` whose error locates each of ``workers``, actors by name."""
    return deadline(seconds, stage, explain=partial(where_stuck, workers))


def numbered(role: str, workers: Iterable[Any]) -> dict[str, Any]:
    """Name the actors of a role "policy-0" and so on."""
    return {f"{role}-{i}": worker for i, worker in enumerate(workers)}


async def where_stuck(workers: Mapping[str, Any]) -> str:
    """Describe each actor's node, process and Python stacks, most recent call last; actors with equal stacks
    share one entry. Takes at most ten seconds. Reports what it could not find out instead of raising.

        policy-0 (node 10.0.0.2, pid 71), policy-1 (node 10.0.0.2, pid 72): in
          File ".../trainer.py", line 120, in update
            loss = self._micro_batches(batch)
    """
    nowhere = dict.fromkeys(workers, _Place(unknown="Ray does not know where"))
    places = await _wait_or_default(_FIND_S, run_in_thread(partial(_find, workers)), nowhere)
    on_nodes: defaultdict[str, list[int]] = defaultdict(list)
    for place in places.values():
        if not place.unknown:
            on_nodes[place.node].append(place.process)
    texts = await gather(_look_on(node, sorted(set(processes))) for node, processes in on_nodes.items())
    # After the stacks were read: these calls would appear in them.
    pending = await gather(_calls(worker) for worker in workers.values())
    stacks = {
        (node, p): text
        for node, processes in zip(on_nodes, texts, strict=True)
        for p, text in processes.items()
    }
    together: defaultdict[str, list[str]] = defaultdict(list)
    for name, waiting in zip(workers, pending, strict=True):
        place = places[name]
        what = place.unknown or stacks[place.node, place.process]
        together["\n".join(filter(None, [what, waiting]))].append(f"{name}{place}")
    return "\n".join(f"{', '.join(who)}: {what}" for what, who in together.items())


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of an actor's process; ``unknown``: why its stacks cannot be read."""

    node: str = ""
    address: str = ""
    process: int = 0
    unknown: str = ""

    def __str__(self) -> str:
        return f" (node {self.address}, pid {self.process})" if self.process else ""


def _find(workers: Mapping[str, Any]) -> dict[str, _Place]:
    # Ray's public interface to this table needs the dashboard, which a private cluster does not start. An
    # actor that hangs in its constructor cannot be asked.
    from ray._private.state import actors

    def place(worker: Any) -> _Place:
        entry = actors(worker._actor_id.hex())
        where = entry["Address"]["NodeID"], entry["Address"]["IPAddress"], entry["Pid"]
        if entry["State"] == "DEAD":
            return _Place(*where, unknown="dead")
        return _Place(*where, unknown="" if where[-1] else "not started: it has no process yet")

    return {name: place(worker) for name, worker in workers.items()}


async def _look_on(node: str, processes: Sequence[int]) -> dict[int, str]:
    """`look` at ``processes`` of ``node``."""
    unknown = dict.fromkeys(processes, f"its node does not answer within {_LOOK_S:g} s")
    if node == ray.get_runtime_context().get_node_id():
        return await _wait_or_default(_LOOK_S, look(processes), unknown)
    remote_look = _look_there.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
    return await _wait_or_default(_LOOK_S, _call(remote_look, processes), unknown)


@ray.remote(num_cpus=0, max_retries=0)
def _look_there(processes: Sequence[int]) -> dict[int, str]:
    return asyncio.run(look(processes))


async def _calls(worker: Any) -> str:
    """Return the pending calls of an actor with an event loop, by its method ``calls``: see
    `grpo_dist.runtime.stacks.pending_calls`.
    """
    return await _wait_or_default(_CALLS_S, _call(worker.calls), "") if hasattr(worker, "calls") else ""


async def _call(method: Any, *arguments: Any) -> Any:
    return await method.remote(*arguments)


async def _wait_or_default(seconds: float, answer: Awaitable[T], default: T) -> T:
    """Return ``default`` if ``answer`` is late or fails: a failed report must not hide the original error."""
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except Exception:
        return default


_PORTABLE = "_raises_portable_errors"


@dataclass(frozen=True, slots=True)
class Health:
    """``work``: a number that changes as work progresses; None: there is no work."""

    work: float | None = None


class Probeable:
    """A worker with a health check, and stack dumps for when it does not answer. Exceptions of its public
    methods reach the driver, see `portable`.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in dir(cls):
            method = inspect.getattr_static(cls, name)
            if not name.startswith("_") and inspect.isfunction(method) and not hasattr(method, _PORTABLE):
                setattr(cls, name, _make_errors_portable(method))

    def __new__(cls, *_: Any, **__: Any) -> Self:
        listen()  # before the constructor runs, which may hang, too
        return super().__new__(cls)

    def health(self) -> Health:
        """Return the worker's progress. Raises when it cannot continue."""
        return Health()


def portable(error: Exception) -> Exception:
    """Return ``error``, or a RuntimeError with its type and text if it cannot be unpickled: its class takes
    other arguments than it passes to its base. Ray would deliver an error without type or cause.
    """
    if isinstance(error, RayError):  # from an actor that this one called
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _make_errors_portable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method``, which raises only what `portable` returns."""

    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return method(*arguments, **keywords)
        except Exception as error:
            if (sent := portable(error)) is error:
                raise
            raise sent from error

    @wraps(method)
    async def wait(*arguments: Any, **keywords: Any) -> Any:
        try:
            return await method(*arguments, **keywords)
        except Exception as error:
            if (sent := portable(error)) is error:
                raise
            raise sent from error

    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        return method
    wrapped = wait if inspect.iscoroutinefunction(method) else call
    setattr(wrapped, _PORTABLE, True)
    return wrapped


def ask_in_parallel(worker: Any) -> Any:
    """Call `Probeable.health` of an actor made by `one_at_a_time`, in parallel to its work."""
    return worker.health.options(concurrency_group=PARALLEL).remote()


def ready(worker: Any) -> Any:
    return worker.ready.remote()
