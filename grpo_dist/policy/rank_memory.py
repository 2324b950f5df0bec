"""What a DeepSpeed rank holds on its device, found in the engine and moved off and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.runtime.memory import HostCopies, release_cache, storages
from grpo_dist.runtime.metering import Timer, untimed


class RankMemory:
    """Everything that a rank's DeepSpeed ``engine`` holds on ``device``, in four parts: what sending the
    weights needs, base weights under adapters, which never change, buffers that gradients go through, and all
    else.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._weights, self._rest = HostCopies(device), HostCopies(device)
        self._frozen, self._scratch = HostCopies(device, constant=True), HostCopies(device, scratch=True)

    def offload(self, *, keep_weights: bool = False, timed: Timer = untimed) -> None:
        """Move the state to host memory, and give the memory it took, and that of the last update, back to
        the device. ``keep_weights``: the weights stay, and can be sent. ``timed`` gets its parts, those of
        `HostCopies.offload` and `release_cache`.
        """
        parameters = list(self._engine.module.parameters())
        weights = [t for p in parameters for t in _parts(p)]
        kept = {storage._cdata for storage in storages(weights, self._device)}
        self._scratch.offload(self._buckets())
        rest = (t for t in self._state_tensors(parameters) if t.untyped_storage()._cdata not in kept)
        self._rest.offload(rest, timed)
        if not keep_weights:
            # Under ZeRO-3 this rank's part alone: each gathering puts a small whole parameter elsewhere.
            self._frozen.offload((_parts(p)[-1] for p in parameters if not p.requires_grad), timed)
            self._weights.offload(weights, timed)
        release_cache(timed)

    def reload(self, *, only_weights: bool = False) -> None:
        """Undo `offload`; ``only_weights``: of what sending the weights needs."""
        for copies in (self._frozen, self._weights):
            copies.reload()
        if not only_weights:
            self._rest.reload()
            self._scratch.reload()

    def _buckets(self) -> Iterator[Tensor]:
        """Yield DeepSpeed's buffers of gradients on their way between ranks, empty between two updates."""
        for bucket in getattr(self._engine.optimizer, "ipg_buckets", {}).values():
            yield from tensors_in(bucket.buffer)

    def _state_tensors(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield gradients and every tensor of the optimizer, and of the one that it wraps."""
        yield from (p.grad for p in parameters if p.grad is not None)
        optimizer = self._engine.optimizer
        for owner in (optimizer, getattr(optimizer, "optimizer", None)):
            yield from tensors_in(vars(owner) if owner is not None else ())


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, and the gradients of leaves."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
        return
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    for each in inner:
        yield from tensors_in(each, seen)


def _parts(parameter: Tensor) -> list[Tensor]:
    """Return ``parameter``, and under ZeRO-3 this rank's part of it."""
    part = getattr(parameter, "ds_tensor", None)
    return [parameter.data] if part is None else [parameter.data, part]
