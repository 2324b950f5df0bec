"""Transports that copy no bytes: all processes map the two buffers of rank 0 and read them in place.

    rank 0                         others
    offer: where the buffers are -> map them, once
    filled                       -> read
                                 <- done: it may be filled again

Only these messages travel, over authenticated connections. A peer that died is noticed at once, one that
hangs by the deadline. An offer is JSON with a few numbers, so that nothing in it can be executed.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from actors.transfer.connections import Connections, Seat
from grpo_dist.errors import TransferLost

_FILLED, _DONE = b"f", b"d"
_LENGTH = struct.Struct("<I")
_LONGEST = 2**16  # bytes of an offer
# The arguments of `reduce_tensor` for a GPU tensor that the other side needs, by their index: the tensor's
# offset, its memory, its reference counter, and an event to wait for.
_IPC = {"offset": 3, "memory": 7, "memory_bytes": 8, "memory_offset": 9}
_IPC |= {"counter": 11, "counter_offset": 12, "event": 13, "event_needed": 14}


class _Shared:
    """The protocol that both kinds share: messages, and their order."""

    device: torch.device

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        self._connections = Connections(seat, timeout_s)
        self._buffers: list[Tensor] = []
        self._offer = b""

    def _make(self, size: int) -> bytes:
        """Make two buffers of ``size`` bytes in ``_buffers``; return what others need to map them."""
        raise NotImplementedError

    def _map(self, offer: bytes) -> list[Tensor]:
        """Map the buffers of ``offer``."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait until pending work on the buffers is done."""

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        if not self._buffers or len(self._buffers[0]) < max(sizes):
            self._buffers = []  # freed before others are made
            self._offer = self._make(max(sizes))
        self._connections.send(_LENGTH.pack(len(self._offer)) + self._offer)
        for i, (size, buffer) in enumerate(zip(sizes, cycle(self._buffers), strict=False)):
            if i >= 2:
                self._connections.receive(len(_DONE))
            yield buffer[:size]
            self._settle()
            self._connections.send(_FILLED)
        for _ in range(min(2, len(sizes))):
            self._connections.receive(len(_DONE))

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        (length,) = _LENGTH.unpack(self._connections.receive(_LENGTH.size))
        if length > _LONGEST:
            raise _Malformed(f"of {length} bytes")
        offer = self._connections.receive(length)
        if offer != self._offer or not self._buffers:
            self._buffers = []
            self._buffers, self._offer = self._map(offer), offer
        for size, buffer in zip(sizes, cycle(self._buffers), strict=False):
            self._connections.receive(len(_FILLED))
            yield buffer[:size]
            self._settle()
            self._connections.send(_DONE)

    def agree(self, own: bool) -> bool:
        return self._connections.agree(own)

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
        return _written({"process": os.getpid(), "descriptor": self._descriptor, "bytes": 2 * each})

    def _map(self, offer: bytes) -> list[Tensor]:
        found = _read(offer, {"process": int, "descriptor": int, "bytes": int})
        process, descriptor, size = found["process"], found["descriptor"], found["bytes"]
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            own = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:  # its process or its transfer has just ended
            raise TransferLost(
                "weight sync: a process of the transfer group is gone: its shared memory cannot be opened "
                f"({error}); if it happens again, set weight_sync.backend=gloo"
            ) from error
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
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return _written({"gpu": self._gpu(), "bytes": size, "buffers": list(map(_handle, self._buffers))})

    def _map(self, offer: bytes) -> list[Tensor]:
        found = _read(offer, {"gpu": str, "bytes": int, "buffers": list})
        if found["gpu"] != self._gpu():
            raise RuntimeError(
                f"weight sync: ipc needs policy and engine on one GPU; the policy is on {found['gpu']}, this "
                f"process on {self._gpu()}; set weight_sync.backend=nccl"
            )
        if len(found["buffers"]) != 2:
            raise _Malformed(f"of {len(found['buffers'])} buffers")
        return [_mapped(handle, found["bytes"], self.device) for handle in found["buffers"]]

    def _gpu(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def _settle(self) -> None:
        torch.cuda.current_stream().synchronize()


class _Malformed(RuntimeError):
    """An offer that rank 0 cannot have made."""

    def __init__(self, what: str) -> None:
        super().__init__(f"weight sync: the offer of shared buffers is malformed ({what})")


def _written(offer: dict[str, Any]) -> bytes:
    return json.dumps(offer).encode()


def _read(offer: bytes, kinds: dict[str, type]) -> dict[str, Any]:
    """Parse the output of `_written`. Raises _Malformed for other keys or types, and numbers below 0."""
    try:
        found = json.loads(offer)
    except (ValueError, RecursionError) as error:
        raise _Malformed("no JSON") from error
    return _checked(found, kinds)


def _checked(found: Any, kinds: dict[str, type]) -> dict[str, Any]:
    if not isinstance(found, dict) or set(found) != set(kinds):
        raise _Malformed("other keys")
    for key, kind in kinds.items():
        if type(found[key]) is not kind or (kind is int and found[key] < 0):
            raise _Malformed(key)
    return found


def _handle(buffer: Tensor) -> dict[str, Any]:
    """Return the handle by which another process maps memory on a GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    found = {name: arguments[place] for name, place in _IPC.items()}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in found.items()}


_HANDLE_TYPES: dict[str, type] = {
    "offset": int, "memory": str, "memory_bytes": int, "memory_offset": int,
    "counter": str, "counter_offset": int, "event": str, "event_needed": bool,
}  # fmt: skip


def _mapped(handle: Any, size: int, device: torch.device) -> Tensor:
    """Map the uint8 [size] behind a `_handle`; ``device`` is the GPU's index in this process."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    found = _checked(handle, _HANDLE_TYPES)
    try:
        memory, counter, event = (bytes.fromhex(found[name]) for name in ("memory", "counter", "event"))
    except ValueError as error:
        raise _Malformed("a handle") from error
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size([size]),
        (1,),
        found["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        device.index,
        memory,
        found["memory_bytes"],
        found["memory_offset"],
        False,
        counter,
        found["counter_offset"],
        event,
        found["event_needed"],
    )


def _halves(descriptor: int, size: int) -> list[Tensor]:
    """Map shared memory of ``size`` bytes as two tensors, with all pages populated."""
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return list(torch.frombuffer(memory, dtype=torch.uint8).chunk(2))
