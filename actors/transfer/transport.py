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
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.transfer.broadcasts import Broadcasts, Transport
from actors.transfer.connections import Connections, Seat
from actors.transfer.group_store import agree_on_store
from grpo_dist.config import TransferBackend
from grpo_dist.errors import TransferLost
from grpo_dist.runtime.hardware import inductor_settings_kept
from grpo_dist.runtime.rendezvous import Rank, check_members, meeting_point, own_address

_POLL_S = 0.0005  # while a broadcast runs on the GPU
_JOIN_POLL_S = 0.05  # while NCCL joins a group


class GlooTransport(Broadcasts):
    """Broadcast over TCP, with a deadline on every operation: a dead peer raises an error.

    Gloo itself does not authenticate. Each process proves that it knows the group's secret before it learns
    the port of the store, and once more over gloo, before any weights are sent.
    """

    device = torch.device("cpu")

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        found = agree_on_store(seat, timeout_s)
        rank = Rank(seat.rank, seat.world_size, seat.host, found.port, timeout_s, listening=found.listening)
        self._store = meeting_point(rank)
        # Gloo's default is the address of the host's own name, which is often unreachable in containers.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(seat.host, seat.port))]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("weights", self._store), seat.rank, seat.world_size, options
        )
        self._timeout = timeout
        check_members(self._gathered, seat.secret, found.challenge, seat.rank)

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

    def agree(self, own: bool) -> bool:
        try:
            return all(bool(each) for each in self._gathered(torch.tensor([own], dtype=torch.uint8)))
        except RuntimeError as error:  # as of a broadcast
            raise TransferLost(f"weight sync: gloo's gathering failed: {error}") from error

    def close(self) -> None:
        del self._group, self._store


class NcclTransport(Broadcasts):
    """Broadcast between GPUs through vLLM's own NCCL communicator, on a stream of its own.

    NCCL never returns when a peer died. A process that notices it, by its connection outside NCCL, aborts the
    communicator, or leaves the thread behind that joins it, and closes its connections, by which the others
    notice it, too.
    """

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        self.device, self._timeout_s = torch.device("cuda", torch.cuda.current_device()), timeout_s
        self._connections = Connections(seat, timeout_s)
        try:
            self._group = _nccl_group(seat, self._connections, self.device, timeout_s)
        except BaseException:
            self._connections.close()
            raise
        self._stream = torch.cuda.Stream(self.device)

    def _start(self, flat: Tensor) -> Callable[[], object]:
        # The current stream fills or reads the buffer: before the broadcast here, and after it once waited
        # for.
        self._stream.wait_stream(torch.cuda.current_stream())
        self._group.broadcast(flat, src=0, stream=self._stream)
        if flat.is_cuda:  # a transfer that fails frees the buffer before this ends
            flat.record_stream(self._stream)
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

    def agree(self, own: bool) -> bool:
        return self._connections.agree(own)

    def close(self) -> None:
        self._group.destroy()  # by ncclCommAbort; it may be called twice
        self._connections.close()


def _nccl_group(seat: Seat, connections: Connections, device: torch.device, timeout_s: float) -> Any:
    """Make vLLM's communicator. Its id is only sent over the authenticated ``connections``. Raises what
    `joined` raises.
    """
    with inductor_settings_kept():
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    if seat.rank == 0:
        made = NCCLLibrary().ncclGetUniqueId()
        unique_id = ctypes.string_at(ctypes.addressof(made.internal), NCCL_UNIQUE_ID_BYTES)
        connections.send(unique_id)
    else:
        unique_id = connections.receive(NCCL_UNIQUE_ID_BYTES)
    join = partial(uid_init_process_group, unique_id, seat.rank, seat.world_size, device.index)
    return joined(join, connections, timeout_s)


def joined(join: Callable[[], Any], connections: Connections, timeout_s: float) -> Any:
    """Return the communicator that ``join`` makes in a thread of its own. vLLM leaves another CUDA stream
    current in the thread that makes one; training stays on its own.

    Raises TransferLost when a process of the group is gone, TimeoutError after ``timeout_s``. The thread, in
    which NCCL may never return, is then left behind; it destroys a communicator that it gets after all.
    """
    found: Future[Any] = Future()

    def run() -> None:
        try:
            group = join()
        except BaseException as error:
            if found.set_running_or_notify_cancel():
                found.set_exception(error)
            return
        if found.set_running_or_notify_cancel():
            found.set_result(group)
        else:
            group.destroy()

    Thread(target=run, name="join NCCL", daemon=True).start()
    end = time.monotonic() + timeout_s
    try:
        while not wait([found], timeout=_JOIN_POLL_S).done:
            connections.check()
            if time.monotonic() > end:
                raise TimeoutError(f"weight sync: NCCL's processes did not join within {timeout_s:g} s")
    except BaseException:
        if not found.cancel() and found.exception() is None:  # bounded: it is done; it came too late
            found.result().destroy()  # bounded: it is done
        raise
    return found.result()  # bounded: it is done


def open_transport(backend: TransferBackend, seat: Seat, *, timeout_s: float) -> Transport:
    """Join the group. Raises TimeoutError or RuntimeError when the others do not join within
    ``timeout_s``.
    """
    # CUDA and shared memory, which most groups do without.
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
