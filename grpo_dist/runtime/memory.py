"""Memory of tensors that leaves the accelerator for host memory and returns, in place; and freed host memory.

    storage   [ a ..... | b .. ]     parameters, partitions and optimiser state are views of storages
    offload   bytes -> host, storage resized to 0     the views stay, without memory
    reload    storage resized to its length <- bytes  the views are as they were, bit by bit

Every view stays the same, so it does not matter which of DeepSpeed's optimizers holds them, or how.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from grpo_dist.runtime.metering import Timer, untimed

# Host memory is pinned in chunks of this many bytes: torch rounds a pinned allocation up to a power of two.
_CHUNK = 64 * 2**20


class HostCopies:
    """Copies in host memory of what `offload` took from ``device``; their memory is kept for the next time.

    ``constant``: the tensors never change, so that their bytes are copied once; they live as long as their
    copies. ``scratch``: their values are not needed, and are zeros afterwards.
    """

    def __init__(self, device: torch.device, *, constant: bool = False, scratch: bool = False) -> None:
        self._device, self._constant, self._scratch = device, constant, scratch
        self._chunks: list[Tensor] = []
        self._end = 0  # bytes in use
        self._begins: dict[int, int | None] = {}  # by storage: its first byte; None: it holds zeros
        # Those of `_begins`, kept so that no other gets the address of one.
        self._storages: list[torch.UntypedStorage] = []
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self, tensors: Iterable[Tensor], timed: Timer = untimed) -> None:
        """Move the memory of ``tensors``, and of all that share it, to the host. Nothing may use them before
        `reload`; without effect while the last ones are away.

        ``timed`` gets the parts `offload_look`, for what holds zeros, `offload_pin`, of host memory that was
        not there the last time, and `offload_copies`.
        """
        if self._away:
            return
        if not self._constant:
            self.forget()
        on_device = storages(tensors, self._device)
        try:
            self._copy([storage for storage in on_device if storage._cdata not in self._begins], timed)
        except BaseException:
            self.forget()  # what has a place on the host by now may not be there
            raise
        self._away = [(storage, storage.nbytes()) for storage in on_device]
        for storage in on_device:
            storage.resize_(0)

    def reload(self) -> None:
        """Undo `offload`."""
        away, self._away = self._away, []
        for storage, size in away:
            storage.resize_(size)
            memory = _bytes_of(storage)
            if self._begins[storage._cdata] is None:
                memory.zero_()
                continue
            for host, place in self._slices(storage):
                memory[place].copy_(host, non_blocking=True)
        self._settle()

    def forget(self) -> None:
        """Copy constant tensors again the next time: they have changed."""
        self._end, self._begins, self._storages = 0, {}, []

    def _copy(self, new: list[torch.UntypedStorage], timed: Timer) -> None:
        with timed("offload_look"):
            copied = self._assign(new)
        with timed("offload_pin"):
            self._grow(self._end)
        with timed("offload_copies"):
            for storage in copied:
                memory = _bytes_of(storage)
                for host, place in self._slices(storage):
                    host.copy_(memory[place], non_blocking=True)
            self._settle()

    def _assign(self, new: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Give each of ``new`` its place on the host; return those that are to be copied there."""
        if self._constant:
            self._storages += new
        # Gradients hold zeros once an update is made.
        holds = [False] * len(new) if self._scratch else _hold_values(new)
        for storage, holds_values in zip(new, holds, strict=True):
            self._begins[storage._cdata] = self._end if holds_values else None
            self._end += storage.nbytes() if holds_values else 0
        return [storage for storage, holds_values in zip(new, holds, strict=True) if holds_values]

    def _grow(self, num_bytes: int) -> None:
        pinned = self._device.type == "cuda"
        while len(self._chunks) * _CHUNK < num_bytes:
            self._chunks.append(torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=pinned))

    def _slices(self, storage: torch.UntypedStorage) -> Iterator[tuple[Tensor, slice]]:
        """Yield the parts of host memory that are for ``storage``, and the bytes of it that each is for."""
        begin, size, done = self._begins[storage._cdata], storage.nbytes(), 0
        assert begin is not None, "zeros are not copied"
        while done < size:
            number, start = divmod(begin + done, _CHUNK)
            length = min(_CHUNK - start, size - done)
            yield self._chunks[number][start : start + length], slice(done, done + length)
            done += length

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Return the distinct storages of ``tensors`` on ``device`` that have memory of their own."""
    by_address = {}
    for tensor in tensors:
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():  # a file mapped into memory is not
            by_address[storage._cdata] = storage
    return list(by_address.values())


def release_cache(timed: Timer = untimed) -> None:
    """Give memory that torch's allocator caches back to the device, for other processes on it. ``timed`` gets
    the parts `offload_collect`, of garbage, and `offload_free`.
    """
    with timed("offload_collect"):
        gc.collect()
    with timed("offload_free"):
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def _hold_values(candidates: list[torch.UntypedStorage]) -> list[bool]:
    """Return which of ``candidates`` hold anything but zeros. It waits for the device once."""
    if not candidates:
        return []
    return [bool(holds) for holds in torch.stack([_bytes_of(s).any() for s in candidates]).tolist()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the operating system.

    glibc keeps what tensors of less than some megabytes occupied: after the supervised training of a model of
    135 M parameters 4.2 GiB of 4.9. Other C libraries than glibc have no such call and keep what they keep.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
