"""Which of several workers takes the next group, and who waits while all are full.

    admit(4 sequences) -> worker 1     the one with the fewest outstanding tokens that has room
    admit(4 sequences) -> waits        first come, first served
    release(1, 4)      -> the first who waits takes worker 1
    withdraw(1)        -> worker 1 is lost with all it had in hand; nobody is sent to it until restore(1)

A decision costs O(log workers), and a release wakes only those who have room now: with a thousand groups
waiting for 64 engines the driver does not look at all of them each time a group is finished.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

# Sequences an engine may have in hand, as a multiple of what it decodes at once: enough to keep it full, few
# enough that the rest waits in the pool, where it can still go to whichever engine is free first.
IN_HAND = 2


class Load(NamedTuple):
    """So many sequences, and the prompt and completion tokens they may come to at most."""

    sequences: int
    tokens: int

    def plus(self, other: Load) -> Load:
        return Load(self.sequences + other.sequences, self.tokens + other.tokens)

    def minus(self, other: Load) -> Load:
        return Load(self.sequences - other.sequences, self.tokens - other.tokens)


@dataclass(slots=True)
class _Hand:
    """What a worker has in hand. ``stamp`` counts its changes: an older entry of the heap says nothing."""

    sequences: int = 0
    tokens: int = 0
    stamp: int = 0


class Admission:
    """``room``: sequences a worker may have in hand; an idle worker takes any group, even a larger one.
    ``on_wait`` is called whenever a group begins to wait.
    """

    def __init__(self, workers: int, room: int, *, on_wait: Callable[[], None] = lambda: None) -> None:
        self._room, self._on_wait = room, on_wait
        self._loads = [_Hand() for _ in range(workers)]
        # (tokens, worker, stamp) of workers that may have room. One that had none for a group leaves, until
        # something of it is released.
        self._open = [(0, i, 0) for i in range(workers)]
        self._waiting: deque[tuple[int, int, asyncio.Future[int]]] = deque()
        self._withdrawn: set[int] = set()
        self._failure: BaseException | None = None

    @property
    def waiting(self) -> bool:
        """Whether a group waits for room."""
        return bool(self._waiting)

    async def admit(self, sequences: int, tokens: int) -> int:
        """The worker that takes the group, whose load it is from now on until `release`. Raises what `fail`
        was given.
        """
        if self._failure is not None:
            raise self._failure
        index = None if self._waiting else self._take(sequences, tokens)
        if index is not None:
            return index
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((sequences, tokens, place))
        self._on_wait()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # admitted and cancelled in the same moment
                self.release(place.result(), sequences, tokens)  # bounded: it is done
            raise

    def release(self, index: int, sequences: int, tokens: int) -> None:
        """So much of worker ``index`` is finished; those who waited for it longest go on."""
        if index in self._withdrawn:  # it has nothing in hand any more
            return
        self._change(index, -sequences, -tokens)
        self._serve()

    def withdraw(self, index: int) -> None:
        """Worker ``index`` is lost: what it had in hand is nobody's, and it is given nothing."""
        self._withdrawn.add(index)
        load = self._loads[index]
        self._loads[index] = _Hand(stamp=load.stamp + 1)  # no entry of the heap speaks of it any more

    def restore(self, index: int) -> None:
        """There is a worker ``index`` again, with nothing in hand."""
        self._withdrawn.discard(index)
        self._change(index, 0, 0)
        self._serve()

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` at all who wait and all who come."""
        self._failure = error
        while self._waiting:
            place = self._waiting.popleft()[2]
            if not place.done():
                place.set_exception(error)

    def _serve(self) -> None:
        while self._waiting:
            wanted, cost, place = self._waiting[0]
            if not place.done():  # a cancelled one only leaves the queue
                taken = self._take(wanted, cost)
                if taken is None:
                    return
                place.set_result(taken)
            self._waiting.popleft()

    def _take(self, sequences: int, tokens: int) -> int | None:
        while self._open:
            _, index, stamp = self._open[0]
            load = self._loads[index]
            if stamp == load.stamp and (load.sequences == 0 or load.sequences + sequences <= self._room):
                self._change(index, sequences, tokens)
                return index
            heapq.heappop(self._open)
        return None

    def _change(self, index: int, sequences: int, tokens: int) -> None:
        load = self._loads[index]
        load.sequences += sequences
        load.tokens += tokens
        load.stamp += 1
        if len(self._open) > 4 * len(self._loads):
            self._open = [entry for entry in self._open if entry[2] == self._loads[entry[1]].stamp]
            heapq.heapify(self._open)
        heapq.heappush(self._open, (load.tokens, index, load.stamp))
