"""Offload tensors to host memory and reload them, in place; and return freed host memory.

    storage   [ a ..... | b .. ]     parameters, partitions and optimiser state are views of storages
    offload   bytes -> host, storage resized to 0     the views stay, without memory
    reload    storage resized to its length <- bytes  the views are bitwise as before

Views stay the same objects, so this works with any DeepSpeed optimizer.
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
    """Host copies of tensors that `offload` moved from ``device``; their memory is kept for the next time.

    ``constant``: the tensors never change, so their bytes are copied once; they live as long as their copies.
    ``scratch``: the values are not needed, and are zeros afterwards.
    """

    def __init__(self, device: torch.device, *, constant: bool = False, scratch: bool = False) -> None:
        self._device, self._constant, self._scratch = device, constant, scratch
        self._chunks: list[Tensor] = []
        self._end = 0  # bytes in use
        self._begins: dict[int, int | None] = {}  # by storage: its first byte; None: it holds zeros
        # The storages in `_begins`, kept so that no new storage gets the same address.
        self._storages: list[torch.UntypedStorage] = []
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self, tensors: Iterable[Tensor], timed: Timer = untimed) -> None:
        """Move the memory of ``tensors``, and of all tensors that share it, to the host. Nothing may use them
        before `reload`. No effect while the last ones are offloaded.

        ``timed`` gets the parts `offload_look` (search for zeros), `offload_pin` (new host memory) and
        `offload_copies`.
        """
        if self._away:
            return
        if not self._constant:
            self.forget()
        on_device = storages(tensors, self._device)
        try:
            self._copy([storage for storage in on_device if storage._cdata not in self._begins], timed)
        except BaseException:
            self.forget()  # some assigned host ranges may not hold their copies yet
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
            for host, span in self._slices(storage):
                memory[span].copy_(host, non_blocking=True)
        self._settle()

    def forget(self) -> None:
        """Copy constant tensors again at the next `offload`: they have changed."""
        self._end, self._begins, self._storages = 0, {}, []

    def _copy(self, new: list[torch.UntypedStorage], timed: Timer) -> None:
        with timed("offload_look"):
            copied = self._assign(new)
        with timed("offload_pin"):
            self._grow(self._end)
        with timed("offload_copies"):
            for storage in copied:
                memory = _bytes_of(storage)
                for host, span in self._slices(storage):
                    host.copy_(memory[span], non_blocking=True)
            self._settle()

    def _assign(self, new: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Assign each of ``new`` its host memory; return the storages to copy there."""
        if self._constant:
            self._storages += new
        # Gradients hold zeros after an update.
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
        """Yield the parts of host memory for ``storage``, each with its byte range in the storage."""
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
    """Return the distinct resizable storages of ``tensors`` on ``device`` that have memory."""
    by_address = {}
    for tensor in tensors:
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():  # a memory-mapped file is not resizable
            by_address[storage._cdata] = storage
    return list(by_address.values())


def release_cache(timed: Timer = untimed) -> None:
    """Return torch's cached memory to the device, for other processes on it, also memory that these had
    mapped. ``timed`` gets the parts `offload_collect` (garbage collection) and `offload_free`.
    """
    with timed("offload_collect"):
        gc.collect()
    with timed("offload_free"):
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def _hold_values(candidates: list[torch.UntypedStorage]) -> list[bool]:
    """Return whether each of ``candidates`` has nonzero bytes. Synchronises with the device once."""
    if not candidates:
        return []
    return [bool(holds) for holds in torch.stack([_bytes_of(s).any() for s in candidates]).tolist()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def return_freed_memory() -> None:
    """Return freed memory of this process to the operating system.

    glibc keeps the memory of freed tensors below some megabytes: 4.2 of 4.9 GiB after supervised training of
    a model with 135 M parameters. C libraries other than glibc have no such call; it has no effect there.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
