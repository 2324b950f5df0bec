"""Exchange many groups per call between the driver and an actor: a call costs the driver's process hundreds
of microseconds, whatever its size.

driver: `Line`                                   actor: `SamplingActor`, `ScoringActor`
  ask(a), ask(b)       --- submit([a, b]) --->     a and b begin
  answers to a and b   <------ collect() -----     waits until one is done, then returns all finished ones

Requests made at the same moment share a call, and so do answers that finish while the driver is busy: the
busier the driver, the fewer calls it makes. Samples stay in the object store until they are fetched, one
reply at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayTaskError

from actors.lifecycle.calls import fetched, portable
from grpo_dist.errors import find_cause
from grpo_dist.runtime.load_balancer import Load
from grpo_dist.types import Group, PackedSamples, Prompt, Rollout, Sampling

# Wait after the first answer: groups that end in the same engine step finish one after the other.
_TOGETHER_S = 0.002


class StoredGroups:
    """The samples of one reply's groups in the object store; used by the driver."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference
        self._fetched: asyncio.Task[PackedSamples] | None = None

    async def group(self, index: int) -> tuple[Rollout, ...]:
        if self._fetched is None:
            self._fetched = asyncio.create_task(fetched(self.reference), name="samples of a reply")
        # Shielded: a cancelled caller does not end the fetch for the others.
        packed = await asyncio.shield(self._fetched)
        return packed.group(index)


@dataclass(frozen=True, slots=True)
class StoredSamples:
    """The samples of one group. Awaiting it fetches them; raises SamplesLost if their node is lost."""

    groups: StoredGroups
    index: int

    def __await__(self) -> Any:
        return self.groups.group(self.index).__await__()


def as_arguments(groups: Iterable[Any]) -> tuple[list[tuple[Any, int | None]], list[Any]]:
    """Return a name for each group's samples in an actor call, and the call's extra arguments: each reply's
    reference once, which Ray replaces by `PackedSamples`.

    Args:
        groups: the samples of each group, or `StoredSamples`.
    """
    names: list[tuple[Any, int | None]] = []
    stored: dict[Any, int] = {}
    for samples in groups:
        if isinstance(samples, StoredSamples):
            names.append((stored.setdefault(samples.groups.reference, len(stored)), samples.index))
        else:
            names.append((samples, None))
    return names, list(stored)


def from_arguments(name: tuple[Any, int | None], stored: Sequence[PackedSamples]) -> Sequence[Rollout]:
    """Return a group's samples in the actor; see `as_arguments`."""
    samples, index = name
    return samples if index is None else stored[samples].group(index)


class Line:
    """The driver's side: requests to one actor, and its answers, on one event loop.

    An error of one request is raised only by its `ask`, the loss of the actor by all unanswered ones.

    Args:
        submit: starts numbered requests on the actor.
        collect: waits for numbered answers; RayTaskError: the actor raised it.
    """

    def __init__(
        self,
        submit: Callable[[Sequence[tuple[int, Any]]], Awaitable[None]],
        collect: Callable[[], Awaitable[Iterable[tuple[int, Any]]]],
    ) -> None:
        self._submit, self._collect = submit, collect
        self._numbers = itertools.count()
        self._unsent: list[tuple[int, Any]] = []
        # Includes requests of cancelled callers until the actor finishes them.
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._collecting = False
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, request: Any) -> Any:
        """Return the actor's answer to ``request``. The caller sets the deadline."""
        loop = asyncio.get_running_loop()
        if not self._unsent:
            loop.call_soon(self._send)  # after the other callers of this moment
        number = next(self._numbers)
        self._unsent.append((number, request))
        answer = self._answers[number] = loop.create_future()
        return await answer

    def close(self) -> None:
        """Cancel the calls to the actor and all waiting callers: nothing else would wake them."""
        for waiting in (*self._calls, *self._answers.values()):
            waiting.cancel()

    def _send(self) -> None:
        requests, self._unsent = self._unsent, []
        self._call(self._begin(requests))
        if not self._collecting:
            self._collecting = True
            self._call(self._collect_all())

    def _call(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call, name="groups in flight on an actor")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _begin(self, requests: Sequence[tuple[int, Any]]) -> None:
        try:
            await self._submit(requests)
        except Exception as error:
            if len(requests) > 1 and isinstance(find_cause(error), ObjectLostError):
                # Some samples of the call are lost: retry each request, as other groups may be intact.
                await asyncio.gather(*(self._begin([request]) for request in requests))
            else:
                self._fail([number for number, _ in requests], error)

    async def _collect_all(self) -> None:
        try:
            while self._answers:
                for number, value in await self._collect():
                    answer = self._answers.pop(number, None)
                    if answer is None or answer.done():  # its caller was cancelled
                        continue
                    if isinstance(value, RayTaskError):
                        answer.set_exception(value.as_instanceof_cause())
                    else:
                        answer.set_result(value)
        except Exception as error:
            self._fail(list(self._answers), error)
        finally:
            self._collecting = False

    def _fail(self, numbers: Iterable[int], error: Exception) -> None:
        for number in numbers:
            answer = self._answers.pop(number, None)
            if answer is not None and not answer.done():
                answer.set_exception(error)


class _Answering:
    """The actor's side, which is asynchronous: keeps answers until they are collected."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[int, Any]] = []
        self._working: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    def _start(self, number: int, work: Coroutine[Any, Any, Any], prompt: Prompt) -> None:
        task = asyncio.create_task(self._answer(number, work), name=f"group of {prompt.uid}")
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _answer(self, number: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            answer = await work
        except (Exception, asyncio.CancelledError) as error:
            sent = portable(error) if isinstance(error, Exception) else RuntimeError("it was cancelled")
            answer = RayTaskError("submit", traceback.format_exc(), sent)
        self._done.append((number, answer))
        self._news.set()

    async def _take(self, is_due: Callable[[], bool] = lambda: False) -> list[tuple[int, Any]]:
        """Wait for an answer, or until ``is_due``; return all answers, errors as Ray sends them."""
        while not (self._done or is_due()):
            self._news.clear()
            await self._news.wait()  # bounded: work that hangs is noticed by the health check
        await asyncio.sleep(_TOGETHER_S)
        done, self._done = self._done, []
        return done


class SamplingActor(_Answering):
    """Part of an engine's actor: runs `sample` for many groups per call. ``finished``: the load of all
    samples finished since its start.
    """

    finished = Load(0, 0)

    async def sample(self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling) -> tuple[Rollout, ...]:
        raise NotImplementedError

    async def submit(self, requests: Sequence[tuple[int, tuple[Prompt, Sequence[int], Sampling]]]) -> None:
        """Begin sampling a group for each of ``requests``."""
        for number, (prompt, seeds, sampling) in requests:
            self._start(number, self.sample(prompt, seeds, sampling), prompt)

    @ray.method(num_returns=2)
    async def collect(
        self, at_least: int
    ) -> tuple[tuple[Load, list[int], list[tuple[int, RayTaskError]]], PackedSamples]:
        """Wait for a finished group, or for ``at_least`` finished sequences.

        Returns (the finished load, the numbers of finished requests, the failed requests), and the samples of
        the finished requests.
        """
        done = await self._take(lambda: self.finished.sequences >= at_least)
        failed = [(number, answer) for number, answer in done if isinstance(answer, RayTaskError)]
        sampled = {number: answer for number, answer in done if not isinstance(answer, RayTaskError)}
        return (self.finished, list(sampled), failed), PackedSamples.from_groups(list(sampled.values()))

    def _count_finished(self, load: Load) -> None:
        self.finished = self.finished.plus(load)
        self._news.set()


class ScoringActor(_Answering):
    """Part of a reward worker's actor: runs `score` for many groups per call, in ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="score")

    def score(
        self, prompt: Prompt, rollouts: Sequence[Rollout], modelled: Mapping[str, Any]
    ) -> tuple[Group, tuple[str, ...]]:
        raise NotImplementedError

    async def submit(self, requests: Sequence[tuple[int, Any]], *stored: PackedSamples) -> None:
        """Begin scoring a group for each of ``requests``: prompt, samples (`as_arguments`), and scores of
        reward models.
        """
        for number, (prompt, name, modelled) in requests:
            self._start(number, self._scores(prompt, from_arguments(name, stored), modelled), prompt)

    async def collect(self) -> list[tuple[int, Any]]:
        """Wait for a scored group; return `Group.scores` and new failure reasons of all scored groups."""
        return await self._take()

    async def _scores(
        self, prompt: Prompt, rollouts: Sequence[Rollout], modelled: Mapping[str, Any]
    ) -> tuple[Any, tuple[str, ...]]:
        loop = asyncio.get_running_loop()
        group, news = await loop.run_in_executor(self._threads, self.score, prompt, rollouts, modelled)
        return group.scores(), news


def submit(worker: Any, requests: Sequence[tuple[int, tuple[Prompt, Any, Mapping[str, Any]]]]) -> Any:
    """Call `ScoringActor.submit` with (prompt, samples, scores of reward models)."""
    names, stored = as_arguments(samples for _, (_, samples, _) in requests)
    calls = [
        (number, (prompt, name, modelled))
        for (number, (prompt, _, modelled)), name in zip(requests, names, strict=True)
    ]
    return worker.submit.remote(calls, *stored)
