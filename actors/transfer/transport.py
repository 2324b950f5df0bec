"""Transports of a transfer group: rank 0 sends, ranks 1 .. N receive buffers of bytes.

A transport is independent of both sides' process groups and of models. It has two buffers, so that one is
filled or read while the other is in transit:

    rank 0    fill a | fill b          | fill a     ...
    a, b             | a leaves ...    | b leaves ...
    others                    | read a           | read b   ...

`GlooTransport` and `NcclTransport` broadcast. Transports within one host copy no bytes: all processes map
rank 0's two buffers and read them in place, so that only messages are sent, over authenticated connections:

    rank 0                         others
    offer: where the buffers are -> map them, unless they are mapped already
    filled                       -> read
                                 <- done: the buffer may be refilled

A dead peer is noticed at once, a hung one by the deadline. An offer is JSON with a few numbers, so nothing in
it can be executed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from itertools import cycle, islice
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from actors.transfer.connections import Connections, Seat, agree_on_store
from grpo_dist.config import TransferBackend
from grpo_dist.errors import TransferLost, UserError
from grpo_dist.runtime.hardware import inductor_settings_kept
from grpo_dist.runtime.rendezvous import Rank, check_members, find_local_address, meeting_point


class Transport(Protocol):
    """Rank 0 calls ``outgoing`` while all others call ``incoming`` with the same sizes, in bytes.

    Both yield one uint8 tensor per size, on ``device``. Rank 0 fills the tensor, which is sent when the next
    one is requested. On other ranks, the tensor is valid until the next one is requested.
    """

    device: torch.device

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]: ...
    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]: ...

    def agree(self, agrees: bool) -> bool:
        """Return whether ``agrees`` is true on every rank. Collective; called between two transfers."""

    def close(self) -> None: ...


class Broadcasts:
    """A transport that broadcasts rank 0's two buffers to all other ranks, asynchronously.

    A subclass sets ``device`` and implements ``_start``, ``agree`` and ``close``. Two broadcasts may be in
    transit at once, in order. Buffers are freed after a transfer: each may hold a whole embedding, and the
    update needs the memory.
    """

    device: torch.device

    def _start(self, flat: Tensor) -> Callable[[], object]:
        """Start broadcasting ``flat``; return a function that waits for completion."""
        raise NotImplementedError

    def broadcast(self, flat: Tensor) -> None:
        """Broadcast ``flat`` from rank 0 to all others and wait."""
        self._start(flat)()

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        in_transit: deque[Callable[[], object]] = deque()
        for size, buffer in zip(sizes, cycle(self._pair(max(sizes))), strict=False):
            if len(in_transit) == 2:
                in_transit.popleft()()
            yield buffer[:size]
            in_transit.append(self._start(buffer[:size]))
        for finish in in_transit:
            finish()

    def incoming(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        buffers = cycle(self._pair(max(sizes)))
        slices = iter([buffer[:size] for size, buffer in zip(sizes, buffers, strict=False)])
        in_transit = deque((flat, self._start(flat)) for flat in islice(slices, 1))
        while in_transit:
            in_transit.extend((flat, self._start(flat)) for flat in islice(slices, 1))
            flat, finish = in_transit.popleft()
            finish()
            yield flat

    def _pair(self, size: int) -> list[Tensor]:
        """Return two buffers of ``size`` bytes."""
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]


_POLL_S = 0.0005  # while a broadcast runs on the GPU
_JOIN_POLL_S = 0.05  # while NCCL joins a group


class GlooTransport(Broadcasts):
    """Broadcast over TCP, with a deadline on every operation: a dead peer raises an error.

    Gloo does not authenticate. Each process proves that it knows the group's secret before it learns the
    store's port, and again over gloo before any weights are sent.
    """

    device = torch.device("cpu")

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        store = agree_on_store(seat, timeout_s)
        rank = Rank(seat.rank, seat.world_size, seat.host, store.port, timeout_s, listening=store.listening)
        self._store = meeting_point(rank)
        # Gloo's default is the address of the hostname, which is often unreachable in containers.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=find_local_address(seat.host, seat.port))
        ]
        options._timeout = timeout
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("weights", self._store), seat.rank, seat.world_size, options
        )
        self._timeout = timeout
        check_members(self._gather, seat.secret, store.challenge, seat.rank)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self._group.size())]
        self._group.allgather([gathered], [tensor]).wait(self._timeout)  # type: ignore[attr-defined]
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

    def agree(self, agrees: bool) -> bool:
        try:
            return all(bool(each) for each in self._gather(torch.tensor([agrees], dtype=torch.uint8)))
        except RuntimeError as error:  # gloo raises nothing more specific
            raise TransferLost(f"weight sync: gloo's gathering failed: {error}") from error

    def close(self) -> None:
        del self._group, self._store


class NcclTransport(Broadcasts):
    """Broadcast between GPUs through vLLM's NCCL communicator, on a separate stream.

    NCCL never returns when a peer died. A process that notices this by its other connection aborts the
    communicator, or abandons the thread that joins it. It also closes its connections, so that the other
    processes notice, too.
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
        # The current stream fills the buffer before the broadcast, or reads it after `_wait`.
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            self._group.broadcast(flat, src=0, stream=self._stream)
        except RuntimeError as error:  # vLLM raises nothing more specific
            self.close()
            raise TransferLost(f"weight sync: NCCL's broadcast failed: {error}") from error
        if flat.is_cuda:  # a failed transfer frees the buffer before the broadcast ends
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

    def agree(self, agrees: bool) -> bool:
        return self._connections.agree(agrees)

    def close(self) -> None:
        self._group.destroy()  # ncclCommAbort; safe to call twice
        self._connections.close()


def _nccl_group(seat: Seat, connections: Connections, device: torch.device, timeout_s: float) -> Any:
    """Make vLLM's communicator; send its id only over authenticated ``connections``.

    Raises like `joined`, and UserError if vLLM's NCCL is disabled.
    """
    with inductor_settings_kept():
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCL_UNIQUE_ID_BYTES, NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    if seat.rank == 0:
        new_id = NCCLLibrary().ncclGetUniqueId()
        unique_id = ctypes.string_at(ctypes.addressof(new_id.internal), NCCL_UNIQUE_ID_BYTES)
        connections.send(unique_id)
    else:
        unique_id = connections.receive(NCCL_UNIQUE_ID_BYTES)
    join = partial(uid_init_process_group, unique_id, seat.rank, seat.world_size, device.index)
    group = joined(join, connections, timeout_s)
    if group.disabled:  # its broadcasts would do nothing
        raise UserError(
            f"VLLM_DISABLE_PYNCCL={os.environ['VLLM_DISABLE_PYNCCL']} disables vLLM's NCCL, over which the "
            "policy sends weights to the engines; unset it, or set weight_sync.backend=gloo"
        )
    return group


def joined(join: Callable[[], Any], connections: Connections, timeout_s: float) -> Any:
    """Return the communicator that ``join`` makes, in a separate thread: vLLM changes that thread's current
    CUDA stream, and training must keep its stream.

    Raises TransferLost if a process of the group is gone, TimeoutError after ``timeout_s``. Then abandons the
    thread, in which NCCL may never return; it destroys a communicator that arrives late.
    """
    communicator: Future[Any] = Future()

    def run() -> None:
        try:
            group = join()
        except BaseException as error:
            if communicator.set_running_or_notify_cancel():
                communicator.set_exception(error)
            return
        if communicator.set_running_or_notify_cancel():
            communicator.set_result(group)
        else:
            group.destroy()

    Thread(target=run, name="join NCCL", daemon=True).start()
    end = time.monotonic() + timeout_s
    try:
        while not wait([communicator], timeout=_JOIN_POLL_S).done:
            connections.check()
            if time.monotonic() > end:
                raise TimeoutError(f"weight sync: NCCL's processes did not join within {timeout_s:g} s")
    except BaseException:
        cancelled = communicator.cancel()
        if not cancelled and communicator.exception() is None:  # bounded: it is done; it came too late
            communicator.result().destroy()  # bounded: it is done
        raise
    return communicator.result()  # bounded: it is done


def open_transport(backend: TransferBackend, seat: Seat, *, timeout_s: float) -> Transport:
    """Join the group. Raises TimeoutError or RuntimeError if others do not join within ``timeout_s``."""
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


_FILLED, _DONE = b"f", b"d"
_LENGTH = struct.Struct("<I")
_LONGEST = 2**16  # maximum bytes of an offer
# Indices of the `reduce_tensor` arguments of a GPU tensor that the other side needs: the tensor's offset, its
# memory, its reference counter, and an event to wait for.
_IPC = {"offset": 3, "memory": 7, "memory_bytes": 8, "memory_offset": 9}
_IPC |= {"counter": 11, "counter_offset": 12, "event": 13, "event_needed": 14}


class _Shared:
    """The message protocol of both transports within one host."""

    device: torch.device

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        self._connections = Connections(seat, timeout_s)
        self._buffers: list[Tensor] = []
        self._offer = b""

    def _make(self, size: int) -> bytes:
        """Make two buffers of ``size`` bytes in ``_buffers``; return the offer by which others map them."""
        raise NotImplementedError

    def _map(self, offer: bytes) -> list[Tensor]:
        """Map the buffers of ``offer``."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait until pending work on the buffers is done."""

    def _end_transfer(self) -> None:
        """Keep the buffers for the next transfer; a subclass may drop them."""

    def outgoing(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        if not self._buffers or len(self._buffers[0]) < max(sizes):
            self._buffers = []  # freed before new ones are made
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
        self._end_transfer()

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
        self._end_transfer()

    def agree(self, agrees: bool) -> bool:
        return self._connections.agree(agrees)

    def close(self) -> None:
        self._connections.close()
        self._buffers = []


class SharedMemoryTransport(_Shared):
    """Transfer through shared memory of one host, without a GPU.

    The memory has no name: others open it through rank 0's descriptor. It is freed with the last process that
    maps it, even if all are killed.
    """

    device = torch.device("cpu")
    _descriptor = -1

    def _make(self, size: int) -> bytes:
        self._release()
        self._descriptor = os.memfd_create("grpo-dist-weights")
        each = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self._descriptor, 2 * each)
        self._buffers = _map_halves(self._descriptor, 2 * each)
        return _encode({"process": os.getpid(), "descriptor": self._descriptor, "bytes": 2 * each})

    def _map(self, offer: bytes) -> list[Tensor]:
        fields = _decode(offer, {"process": int, "descriptor": int, "bytes": int})
        process, descriptor, size = fields["process"], fields["descriptor"], fields["bytes"]
        path = f"/proc/{process}/fd/{descriptor}"
        try:
            local_descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:  # rank 0's process or transfer has just ended
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
            return _map_halves(local_descriptor, size)
        finally:
            os.close(local_descriptor)  # the mapping stays

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self) -> None:
        super().close()
        self._release()


class IpcTransport(_Shared):
    """Transfer between processes on one GPU: sends CUDA IPC handles of the buffers, not their bytes.

    Both sides drop the buffers after a transfer: the update needs the memory, see `release_cache`.
    """

    def __init__(self, seat: Seat, *, timeout_s: float) -> None:
        super().__init__(seat, timeout_s=timeout_s)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def _make(self, size: int) -> bytes:
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return _encode({"gpu": self._gpu(), "bytes": size, "buffers": list(map(_handle, self._buffers))})

    def _map(self, offer: bytes) -> list[Tensor]:
        fields = _decode(offer, {"gpu": str, "bytes": int, "buffers": list})
        if fields["gpu"] != self._gpu():
            raise RuntimeError(
                f"weight sync: ipc needs policy and engine on one GPU; the policy is on {fields['gpu']}, "
                f"this process on {self._gpu()}; set weight_sync.backend=nccl"
            )
        if len(fields["buffers"]) != 2:
            raise _Malformed(f"of {len(fields['buffers'])} buffers")
        return [_map_handle(handle, fields["bytes"], self.device) for handle in fields["buffers"]]

    def _gpu(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def _settle(self) -> None:
        torch.cuda.current_stream().synchronize()

    def _end_transfer(self) -> None:
        self._buffers = []


class _Malformed(RuntimeError):
    """An offer that rank 0 cannot have made."""

    def __init__(self, what: str) -> None:
        super().__init__(f"weight sync: the offer of shared buffers is malformed ({what})")


def _encode(offer: dict[str, Any]) -> bytes:
    return json.dumps(offer).encode()


def _decode(offer: bytes, kinds: dict[str, type]) -> dict[str, Any]:
    """Parse the output of `_encode`. Raises _Malformed for other keys or types, and negative numbers."""
    try:
        fields = json.loads(offer)
    except (ValueError, RecursionError) as error:
        raise _Malformed("no JSON") from error
    return _check_fields(fields, kinds)


def _check_fields(fields: Any, kinds: dict[str, type]) -> dict[str, Any]:
    if not isinstance(fields, dict) or set(fields) != set(kinds):
        raise _Malformed("other keys")
    for key, kind in kinds.items():
        if type(fields[key]) is not kind or (kind is int and fields[key] < 0):
            raise _Malformed(key)
    return fields


def _handle(buffer: Tensor) -> dict[str, Any]:
    """Return the handle by which another process maps the GPU buffer."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    handle = {name: arguments[place] for name, place in _IPC.items()}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in handle.items()}


_HANDLE_TYPES: dict[str, type] = {
    "offset": int, "memory": str, "memory_bytes": int, "memory_offset": int,
    "counter": str, "counter_offset": int, "event": str, "event_needed": bool,
}  # fmt: skip


def _map_handle(handle: Any, size: int, device: torch.device) -> Tensor:
    """Map the uint8 tensor [size] of a `_handle`; ``device``: the GPU in this process."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    fields = _check_fields(handle, _HANDLE_TYPES)
    try:
        memory, counter, event = (bytes.fromhex(fields[name]) for name in ("memory", "counter", "event"))
    except ValueError as error:
        raise _Malformed("a handle") from error
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size([size]),
        (1,),
        fields["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        device.index,
        memory,
        fields["memory_bytes"],
        fields["memory_offset"],
        False,
        counter,
        fields["counter_offset"],
        event,
        fields["event_needed"],
    )


def _map_halves(descriptor: int, size: int) -> list[Tensor]:
    """Map shared memory of ``size`` bytes as two tensors, with all pages populated."""
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return list(torch.frombuffer(memory, dtype=torch.uint8).chunk(2))
