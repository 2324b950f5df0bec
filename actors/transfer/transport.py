"""The group that carries weights: policy rank 0 is rank 0, the processes that receive are 1 .. N.

It stands beside each side's own process groups and knows nothing of models: it moves buffers of bytes. There
are two of them, so that one is filled or read while the other travels:

    rank 0    fill a | fill b          | fill a     ...
    a, b             | a leaves ...    | b leaves ...
    others                    | read a           | read b   ...
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import cycle, islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from actors.transfer.connections import Connections, Seat
from actors.transfer.meeting import meet
from grpo_dist.config import TransferBackend
from grpo_dist.errors import TransferLost
from grpo_dist.runtime.rendezvous import check_members, meeting_point, own_address

_LOOK_S = 0.0005  # between two looks at a broadcast on the GPU


class Transport(Protocol):
    """Rank 0 calls ``outgoing`` while all others call ``incoming`` with the same sizes, in bytes.

    Both yield one uint8 tensor per size, on ``device``. What rank 0 has put into one leaves when the next is
    asked for; what others find in one is valid until the next is asked for.
    """

    device: torch.device

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]: ...
    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]: ...
    def close(self) -> None: ...


class _Broadcasts:
    """Copies the two buffers of rank 0 into those of everyone else, by a broadcast that runs on its own."""

    device: torch.device

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def _start(self, flat: Tensor) -> Callable[[], object]:
        """Begin to broadcast ``flat``; what is returned waits for the end."""
        raise NotImplementedError

    def broadcast(self, flat: Tensor) -> None:
        """All of ``flat`` at once, from rank 0's to everyone's."""
        self._start(flat)()

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        under_way: deque[Callable[[], object]] = deque()
        for size, buffer in zip(sizes, cycle(self._pair(max(sizes))), strict=False):
            if len(under_way) == 2:
                under_way.popleft()()
            yield buffer[:size]
            under_way.append(self._start(buffer[:size]))
        for wait in under_way:
            wait()

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        pieces = iter(
            [buffer[:size] for size, buffer in zip(sizes, cycle(self._pair(max(sizes))), strict=False)]
        )
        under_way = deque((flat, self._start(flat)) for flat in islice(pieces, 1))
        while under_way:
            under_way.extend((flat, self._start(flat)) for flat in islice(pieces, 1))
            flat, wait = under_way.popleft()
            wait()
            yield flat

    def _pair(self, size: int) -> list[Tensor]:
        """Two buffers of ``size`` bytes or more, kept for the next round."""
        if not self._buffers or len(self._buffers[0]) < size:
            self._buffers = []  # freed before others are made
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._buffers


class GlooTransport(_Broadcasts):
    """Broadcast over TCP, with a deadline on every operation: a dead peer raises, it never blocks for good.
    Gloo itself asks for no secret: each process proves that it knows the group's before the others say where
    they meet, and once more over gloo, before any weights are sent.
    """

    device = torch.device("cpu")

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        super().__init__()
        timeout = timedelta(seconds=timeout_s)
        host, rank, world_size, found = seat.host, seat.rank, seat.world_size, meet(seat, timeout_s)
        self._store = meeting_point(
            host,
            found.port,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            listening=found.listening,
        )
        # Gloo's default is the address of the host's own name, which in containers often answers to nobody.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(host, seat.port))]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("weights", self._store), rank, world_size, options
        )
        self._timeout = timeout
        check_members(self._gathered, seat.secret, found.question, rank)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self._group.size())]
        self._group.allgather([gathered], [own]).wait(self._timeout)  # type: ignore[attr-defined]
        return gathered

    def _start(self, flat: Tensor) -> Callable[[], object]:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        work = self._group.broadcast([flat], options)  # type: ignore[attr-defined]

        def wait() -> None:
            try:
                work.wait(self._timeout)
            except RuntimeError as error:  # gloo has no other kind
                raise TransferLost(f"weight sync: gloo's broadcast failed: {error}") from error

        return wait

    def close(self) -> None:
        del self._group, self._store


class NcclTransport(_Broadcasts):
    """Broadcast between GPUs through vLLM's own NCCL communicator, on a stream beside the one that packs and
    loads.

    NCCL waits for good for a peer that died. Who notices, by its connection beside NCCL, aborts the
    communicator and ends its own connections, by which the others notice.
    """

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        super().__init__()
        self.device, self._timeout_s = torch.device("cuda", torch.cuda.current_device()), timeout_s
        self._connections = Connections(seat, timeout_s)
        self._group = _nccl_group(seat, self._connections, self.device)
        self._stream = torch.cuda.Stream(self.device)

    def _start(self, flat: Tensor) -> Callable[[], object]:
        # What fills or reads the buffer is on the current stream; it comes before, and waits after.
        self._stream.wait_stream(torch.cuda.current_stream())
        self._group.broadcast(flat, src=0, stream=self._stream)
        arrived = self._stream.record_event()
        return lambda: self._wait(arrived)

    def _wait(self, arrived: torch.cuda.Event) -> None:
        end = time.monotonic() + self._timeout_s
        try:
            while not arrived.query():
                self._connections.check()
                if time.monotonic() > end:
                    raise TimeoutError(f"weight sync: NCCL's broadcast took more than {self._timeout_s:g} s")
                time.sleep(_LOOK_S)
        except (TransferLost, TimeoutError):
            self.close()  # whatever waits on the GPU ends
            raise

    def close(self) -> None:
        self._group.destroy()  # by ncclCommAbort; it may be called twice
        self._connections.close()


def _nccl_group(seat: Seat, connections: Connections, device: torch.device) -> Any:
    """vLLM's communicator. Its id goes to those alone who know the secret, over their ``connections``."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    if seat.rank == 0:
        made = NCCLLibrary().ncclGetUniqueId()
        unique_id = ctypes.string_at(ctypes.addressof(made.internal), NCCL_UNIQUE_ID_BYTES)
        connections.tell(unique_id)
    else:
        unique_id = connections.hear(NCCL_UNIQUE_ID_BYTES)
    return uid_init_process_group(unique_id, seat.rank, seat.world_size, device.index)


def open_transport(backend: TransferBackend, seat: Seat, *, timeout_s: float) -> Transport:
    """Join the group. Raises TimeoutError or RuntimeError where the others do not within ``timeout_s``."""
    from actors.transfer.shared_transport import IpcTransport, SharedMemoryTransport

    if backend == "shared_memory":
        return SharedMemoryTransport(seat, timeout_s=timeout_s)
    if backend == "ipc":
        return IpcTransport(seat, timeout_s=timeout_s)
    return open_broadcasts(backend, seat, timeout_s=timeout_s)


def open_broadcasts(backend: str, seat: Seat, *, timeout_s: float) -> GlooTransport | NcclTransport:
    """Of those, ``gloo`` or ``nccl``."""
    return (GlooTransport if backend == "gloo" else NcclTransport)(seat, timeout_s=timeout_s)


def free_port(host: str) -> int:
    """A port of ``host`` (this machine) that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
