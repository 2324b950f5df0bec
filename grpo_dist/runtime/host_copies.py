"""Memory of tensors that leaves the accelerator for host memory and returns, in place.

    storage   [ a ..... | b .. ]     parameters, partitions and optimiser state are views of storages
    offload   bytes -> host, storage resized to 0     the views stay, without memory
    reload    storage resized to its length <- bytes  the views are as they were, bit by bit

Every view stays the same, so it does not matter which of DeepSpeed's optimizers holds them, or how.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

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
        self._known: list[torch.UntypedStorage] = []
        self._away: list[tuple[torch.UntypedStorage, int]] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move the memory of ``tensors``, and of all that share it, to the host. Nothing may use them before
        `reload`; without effect while the last ones are away.
        """
        if self._away:
            return
        if not self._constant:
            self.forget()
        for storage in storages(tensors, self._device):
            self._copy(storage)
            self._away.append((storage, storage.nbytes()))
        self._settle()
        for storage, _ in self._away:
            storage.resize_(0)

    def reload(self) -> None:
        """Undo `offload`."""
        away, self._away = self._away, []
        for storage, size in away:
            storage.resize_(size)
            memory, begin = _bytes_of(storage), self._begins[storage._cdata]
            if begin is None:
                memory.zero_()
                continue
            for host, place in self._slices(begin, size):
                memory[place].copy_(host, non_blocking=True)
        self._settle()

    def forget(self) -> None:
        """Copy constant tensors again the next time: they have changed."""
        self._end, self._begins, self._known = 0, {}, []

    def _copy(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._begins:
            return
        if self._constant:
            self._known.append(storage)
        memory = _bytes_of(storage)
        if self._scratch or not memory.any():  # gradients hold zeros once an update is made
            self._begins[storage._cdata] = None
            return
        self._begins[storage._cdata] = self._end
        for host, place in self._slices(self._end, len(memory)):
            host.copy_(memory[place], non_blocking=True)
        self._end += len(memory)

    def _slices(self, begin: int, size: int) -> Iterator[tuple[Tensor, slice]]:
        """Yield the parts of host memory from ``begin`` on, and the part of ``size`` bytes each is for."""
        done = 0
        while done < size:
            number, start = divmod(begin + done, _CHUNK)
            while len(self._chunks) <= number:
                pinned = self._device.type == "cuda"
                self._chunks.append(torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=pinned))
            length = min(_CHUNK - start, size - done)
            yield self._chunks[number][start : start + length], slice(done, done + length)
            done += length

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Return the distinct storages of ``tensors`` on ``device`` that have memory of their own."""
    found = {}
    for tensor in tensors:
        if tensor.device.type != device.type:
            continue
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():  # a file mapped into memory is not
            found[storage._cdata] = storage
    return list(found.values())


def release_cache() -> None:
    """Give memory that torch's allocator caches back to the device, for other processes on it."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
