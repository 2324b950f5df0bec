"""Assign each group to a worker, and queue groups while all workers are full.

    admit(4 sequences) -> worker 1     the worker with capacity and the fewest outstanding tokens
    admit(4, prefer=2) -> worker 2     if it has no more sequences than worker 1, and hardly more tokens
    admit(4 sequences) -> waits        first come, first served
    release(1, 4)      -> the first waiting group takes worker 1
    withdraw(1)        -> worker 1 is lost with its groups, and gets no more until restore(1)
    close(1)           -> worker 1 finishes its groups, and gets no more until restore(1)

A release wakes only groups that fit now: with a thousand groups waiting for 64 engines, the driver does not
visit all of them each time a group finishes. It considers only the released worker, as no other has new room.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

# Sequences assigned to an engine, as a multiple of its decoding batch: enough to keep it full, few enough
# that the rest waits in the pool, where the first free engine can take it.
QUEUE_DEPTH = 2


class Load(NamedTuple):
    """A number of sequences, and their maximum prompt and completion tokens."""

    sequences: int
    tokens: int

    def plus(self, other: Load) -> Load:
        return Load(self.sequences + other.sequences, self.tokens + other.tokens)

    def minus(self, other: Load) -> Load:
        return Load(self.sequences - other.sequences, self.tokens - other.tokens)


@dataclass(slots=True)
class _Slot:
    """The load of one worker."""

    sequences: int = 0
    tokens: int = 0


class LoadBalancer:
    """Assigns groups to workers.

    Args:
        capacity: sequences a worker may be assigned; an idle worker takes any group, even a larger one.
    """

    def __init__(self, workers: int, capacity: int) -> None:
        self._capacity = capacity
        self._loads = [_Slot() for _ in range(workers)]
        self._waiting: deque[tuple[int, int, asyncio.Future[int]]] = deque()
        self._withdrawn: set[int] = set()
        self._closed: set[int] = set()
        self._failure: BaseException | None = None

    @property
    def waiting(self) -> bool:
        """True while a group waits for a worker."""
        return bool(self._waiting)

    async def admit(self, sequences: int, tokens: int, *, prefer: int | None = None) -> int:
        """Return the worker for the group; add the load to it until `release`. Raises the error of `fail`.

        ``prefer``: the worker to use if its load about equals the lowest: no more sequences, and an excess of
        tokens below the group's tokens, as prompts differ in length. Ignored for a group that waits.
        """
        if self._failure is not None:
            raise self._failure
        index = None
        if not self._waiting:
            index = self._take(sequences, tokens, self._keep_if_least(prefer, sequences, tokens))
        if index is not None:
            return index
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((sequences, tokens, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at the same moment
                self.release(turn.result(), sequences, tokens)  # bounded: it is done
            else:
                self._serve()  # the next one may fit
            raise

    def release(self, index: int, sequences: int, tokens: int) -> None:
        """Subtract finished load from worker ``index``, and assign the longest-waiting groups."""
        if index in self._withdrawn:  # its load was already dropped
            return
        load = self._loads[index]
        load.sequences -= sequences
        load.tokens -= tokens
        if self._waiting:
            self._serve(index)

    def withdraw(self, index: int) -> None:
        """Take worker ``index`` out of service and drop its load."""
        self._withdrawn.add(index)
        self._loads[index] = _Slot()

    def close(self, index: int) -> None:
        """Assign no more groups to worker ``index``; it keeps its current ones."""
        self._closed.add(index)

    def sequences(self, index: int) -> int:
        """Return the unfinished sequences of worker ``index``."""
        return self._loads[index].sequences

    def restore(self, index: int) -> None:
        """Put worker ``index`` back into service, without load."""
        self._withdrawn.discard(index)
        self._closed.discard(index)
        self._serve(index)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in all waiting and all future calls of `admit`."""
        self._failure = error
        while self._waiting:
            turn = self._waiting.popleft()[2]
            if not turn.done():
                turn.set_exception(error)

    def _serve(self, only: int | None = None) -> None:
        """Assign the longest-waiting groups. ``only``: the only worker with new room since the first group
        was refused; None: any worker may have room.
        """
        while self._waiting:
            sequences, tokens, turn = self._waiting[0]
            if turn.done():  # a cancelled group leaves the queue; the next one was not refused yet
                only = None
            else:
                index = self._take(sequences, tokens, only)
                if index is None:
                    return
                turn.set_result(index)
            self._waiting.popleft()
            if self._waiting and self._waiting[0][0] < sequences:  # may fit where this one did not
                only = None

    def _take(self, sequences: int, tokens: int, only: int | None = None) -> int | None:
        """Assign the group to the worker with capacity and the fewest tokens, if any. ``only``: consider only
        this worker.
        """
        if only is None:
            index = self._least_loaded(sequences)
        else:
            index = only if self._has_room(only, sequences) else None
        if index is not None:
            self._loads[index].sequences += sequences
            self._loads[index].tokens += tokens
        return index

    def _keep_if_least(self, index: int | None, sequences: int, tokens: int) -> int | None:
        """Return ``index`` if it has room for the group and its load about equals the lowest, else None."""
        least = self._least_loaded(sequences) if index is not None else None
        if index is None or least is None or not self._has_room(index, sequences):
            return None
        load, fewest = self._loads[index], self._loads[least]
        equal = load.sequences <= fewest.sequences and load.tokens - fewest.tokens < tokens
        return index if equal else None

    def _least_loaded(self, sequences: int) -> int | None:
        """Return the worker with room for ``sequences`` and the fewest tokens; the first of equals."""
        least: int | None = None
        fewest = math.inf
        for index, load in enumerate(self._loads):  # each group looks at all workers
            if load.tokens < fewest and self._has_room(index, sequences):
                least, fewest = index, load.tokens
        return least

    def _has_room(self, index: int, sequences: int) -> bool:
        """Return whether worker ``index`` is in service and has room for ``sequences``."""
        assigned = self._loads[index].sequences
        if assigned and assigned + sequences > self._capacity:
            return False
        return index not in self._withdrawn and index not in self._closed
