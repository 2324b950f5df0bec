"""Transports that move no bytes: everyone reads the two buffers of rank 0 where they lie.

    rank 0                         others
    offer: where the buffers are -> map them, once
    filled                       -> read
                                 <- done: it may be filled again

Only these words travel, over a connection each, so that a peer that died is noticed at once, and one that
hangs by the deadline. They are pickles, taken from nobody who does not know the secret of the group.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from actors.connections import Connections, Seat

_FILLED, _DONE = b"f", b"d"
_LENGTH = struct.Struct("<I")


class _Shared:
    """What both kinds have in common: the words, and who waits for whom."""

    device: torch.device

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        self._connections = Connections(seat, timeout_s)
        self._buffers: list[Tensor] = []
        self._offer = b""

    def _make(self, size: int) -> bytes:
        """Two buffers of ``size`` bytes into ``_buffers``; returns what others need to map them."""
        raise NotImplementedError

    def _map(self, offer: bytes) -> list[Tensor]:
        """The buffers that ``offer`` speaks of."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Returns once what was begun on the buffers is done."""

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        if not self._buffers or len(self._buffers[0]) < max(sizes):
            self._buffers = []  # freed before others are made
            self._offer = self._make(max(sizes))
        self._connections.tell(_LENGTH.pack(len(self._offer)) + self._offer)
        for i, (size, buffer) in enumerate(zip(sizes, cycle(self._buffers), strict=False)):
            if i >= 2:
                self._connections.hear(len(_DONE))
            yield buffer[:size]
            self._settle()
            self._connections.tell(_FILLED)
        for _ in range(min(2, len(sizes))):
            self._connections.hear(len(_DONE))

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        offer = self._connections.hear(_LENGTH.unpack(self._connections.hear(_LENGTH.size))[0])
        if offer != self._offer:
            self._buffers = []
            self._buffers, self._offer = self._map(offer), offer
        for size, buffer in zip(sizes, cycle(self._buffers), strict=False):
            self._connections.hear(len(_FILLED))
            yield buffer[:size]
            self._settle()
            self._connections.tell(_DONE)

    def close(self) -> None:
        self._connections.close()
        self._buffers = []


class SharedMemoryTransport(_Shared):
    """Between processes of one host, without a GPU.

    The memory has no name: others reach it through the descriptor rank 0 holds. It is gone with the last
    process that maps it, also when all are killed.
    """

    device = torch.device("cpu")
    _descriptor = -1

    def _make(self, size: int) -> bytes:
        self._release()
        self._descriptor = os.memfd_create("grpo-dist-weights")
        each = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._descriptor, 2 * each)
        self._buffers = _halves(self._descriptor, 2 * each)
        return pickle.dumps((os.getpid(), self._descriptor, 2 * each))

    def _map(self, offer: bytes) -> list[Tensor]:
        process, descriptor, size = pickle.loads(offer)
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            own = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RuntimeError(
                f"weight sync: shared memory of another process cannot be opened ({error}); set "
                "weight_sync.backend=gloo"
            ) from error
        try:
            return _halves(own, size)
        finally:
            os.close(own)  # the mapping stays

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        super().close()
        self._release()


class IpcTransport(_Shared):
    """Between processes that share one GPU: CUDA IPC handles of the buffers go instead of their bytes."""

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        super().__init__(seat, timeout_s=timeout_s)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def _make(self, size: int) -> bytes:
        from torch.multiprocessing.reductions import reduce_tensor

        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return pickle.dumps((self._gpu(), [reduce_tensor(buffer) for buffer in self._buffers]))

    def _map(self, offer: bytes) -> list[Tensor]:
        gpu, handles = pickle.loads(offer)
        if gpu != self._gpu():
            raise RuntimeError(
                f"weight sync: ipc needs policy and engine on one GPU; the policy is on {gpu}, this process "
                f"on {self._gpu()}; set weight_sync.backend=nccl"
            )
        return [rebuild(*self._here(arguments)) for rebuild, arguments in handles]

    def _here(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `reduce_tensor` gave, with the number that the GPU has in this process (the seventh)."""
        return (*arguments[:6], self.device.index, *arguments[7:])

    def _gpu(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def _settle(self) -> None:
        torch.cuda.current_stream().synchronize()


def _halves(descriptor: int, size: int) -> list[Tensor]:
    """Shared memory of ``size`` bytes as two tensors, all pages there from the start."""
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return list(torch.frombuffer(memory, dtype=torch.uint8).chunk(2))
