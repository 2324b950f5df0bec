"""Transports of a transfer group: rank 0 sends, ranks 1 .. N receive buffers of bytes.

A transport is independent of either side's own process groups and of models. It has two buffers, so that one
is filled or read while the other is in transit:

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
from actors.transfer.group_store import agree_on_store
from grpo_dist.config import TransferBackend
from grpo_dist.errors import TransferLost
from grpo_dist.runtime.rendezvous import check_members, meeting_point, own_address

_POLL_S = 0.0005  # while a broadcast runs on the GPU


class Transport(Protocol):
    """Rank 0 calls ``outgoing`` while all others call ``incoming`` with the same sizes, in bytes.

    Both yield one uint8 tensor per size, on ``device``. Rank 0 fills the tensor, which is sent when the next
    one is requested. On the other ranks its contents are valid until the next one is requested.
    """

    device: torch.device

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]: ...
    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]: ...
    def close(self) -> None: ...


class _Broadcasts:
    """Broadcasts the two buffers of rank 0 to all other ranks, asynchronously."""

    device: torch.device

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

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
        """Return two buffers of at least ``size`` bytes, kept for the next round."""
        if not self._buffers or len(self._buffers[0]) < size:
            self._buffers = []  # freed before others are made
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._buffers


class GlooTransport(_Broadcasts):
    """Broadcast over TCP, with a deadline on every operation: a dead peer raises an error.

    Gloo itself does not authenticate. Each process proves that it knows the group's secret before it learns
    the port of the store, and once more over gloo, before any weights are sent.
    """

    device = torch.device("cpu")

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        super().__init__()
        timeout = timedelta(seconds=timeout_s)
        host, rank, world_size, found = seat.host, seat.rank, seat.world_size, agree_on_store(seat, timeout_s)
        self._store = meeting_point(
            host,
            found.port,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            listening=found.listening,
        )
        # Gloo's default is the address of the host's own name, which is often unreachable in containers.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(host, seat.port))]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("weights", self._store), rank, world_size, options
        )
        self._timeout = timeout
        check_members(self._gathered, seat.secret, found.challenge, rank)

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
            except RuntimeError as error:  # gloo raises nothing more specific
                raise TransferLost(f"weight sync: gloo's broadcast failed: {error}") from error

        return wait

    def close(self) -> None:
        del self._group, self._store


class NcclTransport(_Broadcasts):
    """Broadcast between GPUs through vLLM's own NCCL communicator, on a stream of its own.

    NCCL never returns when a peer died. A process that notices it, by its connection outside NCCL, aborts the
    communicator and closes its connections, by which the others notice it, too.
    """

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        super().__init__()
        self.device, self._timeout_s = torch.device("cuda", torch.cuda.current_device()), timeout_s
        self._connections = Connections(seat, timeout_s)
        self._group = _nccl_group(seat, self._connections, self.device)
        self._stream = torch.cuda.Stream(self.device)

    def _start(self, flat: Tensor) -> Callable[[], object]:
        # The current stream fills or reads the buffer: before the broadcast here, and after it once waited
        # for.
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
                time.sleep(_POLL_S)
        except (TransferLost, TimeoutError):
            self.close()  # ends pending work on the GPU
            raise

    def close(self) -> None:
        self._group.destroy()  # by ncclCommAbort; it may be called twice
        self._connections.close()


def _nccl_group(seat: Seat, connections: Connections, device: torch.device) -> Any:
    """Make vLLM's communicator. Its id is only sent over the authenticated ``connections``."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    if seat.rank == 0:
        made = NCCLLibrary().ncclGetUniqueId()
        unique_id = ctypes.string_at(ctypes.addressof(made.internal), NCCL_UNIQUE_ID_BYTES)
        connections.send(unique_id)
    else:
        unique_id = connections.receive(NCCL_UNIQUE_ID_BYTES)
    return uid_init_process_group(unique_id, seat.rank, seat.world_size, device.index)


def open_transport(backend: TransferBackend, seat: Seat, *, timeout_s: float) -> Transport:
    """Join the group. Raises TimeoutError or RuntimeError when the others do not join within
    ``timeout_s``.
    """
    from actors.transfer.shared_transport import IpcTransport, SharedMemoryTransport

    if backend == "shared_memory":
        return SharedMemoryTransport(seat, timeout_s=timeout_s)
    if backend == "ipc":
        return IpcTransport(seat, timeout_s=timeout_s)
    return open_broadcasts(backend, seat, timeout_s=timeout_s)


def open_broadcasts(backend: str, seat: Seat, *, timeout_s: float) -> GlooTransport | NcclTransport:
    """Join a group that broadcasts over ``gloo`` or ``nccl``."""
    return (GlooTransport if backend == "gloo" else NcclTransport)(seat, timeout_s=timeout_s)


def free_port(host: str) -> int:
    """Return a port of ``host`` (this machine) that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
