"""What every transport of weights offers, and the pipelining of those that broadcast."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Protocol

import torch
from torch import Tensor


class Transport(Protocol):
    """Rank 0 calls ``outgoing`` while all others call ``incoming`` with the same sizes, in bytes.

    Both yield one uint8 tensor per size, on ``device``. Rank 0 fills the tensor, which is sent when the next
    one is requested. On the other ranks its contents are valid until the next one is requested.
    """

    device: torch.device

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]: ...
    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]: ...

    def agree(self, own: bool) -> bool:
        """Return whether ``own`` is true on every rank. All ranks call it, between two transfers."""

    def close(self) -> None: ...


class Broadcasts:
    """A transport that broadcasts the two buffers of rank 0 to all other ranks, asynchronously.

    A subclass sets ``device`` and writes ``_start``. Two broadcasts may be on their way at once, in order.
    After a transfer the buffers are freed: each may hold a whole embedding, and the update needs the memory.
    """

    device: torch.device

    def _start(self, flat: Tensor) -> Callable[[], object]:
        """Start to broadcast ``flat``; return a function that waits for the end."""
        raise NotImplementedError

    def broadcast(self, flat: Tensor) -> None:
        """Broadcast ``flat`` from rank 0 to all others, and wait."""
        self._start(flat)()

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        in_transit: deque[Callable[[], object]] = deque()
        for size, buffer in zip(sizes, cycle(self._pair(max(sizes))), strict=False):
            if len(in_transit) == 2:
                in_transit.popleft()()
            yield buffer[:size]
            in_transit.append(self._start(buffer[:size]))
        for wait in in_transit:
            wait()

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        pieces = iter(
            [buffer[:size] for size, buffer in zip(sizes, cycle(self._pair(max(sizes))), strict=False)]
        )
        in_transit = deque((flat, self._start(flat)) for flat in islice(pieces, 1))
        while in_transit:
            in_transit.extend((flat, self._start(flat)) for flat in islice(pieces, 1))
            flat, wait = in_transit.popleft()
            wait()
            yield flat

    def _pair(self, size: int) -> list[Tensor]:
        """Return two buffers of ``size`` bytes."""
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
