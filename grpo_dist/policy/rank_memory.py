"""Offload and reload of the tensors that a DeepSpeed rank's engine has on its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_dist.runtime.memory import HostCopies, release_cache, storages
from grpo_dist.runtime.metering import Timer, untimed


class RankMemory:
    """All tensors of a rank's DeepSpeed ``engine`` on ``device``, in four parts: weights to send, frozen base
    weights under adapters, communication buffers of gradients, and all else.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._weights, self._rest = HostCopies(device), HostCopies(device)
        self._frozen, self._scratch = HostCopies(device, constant=True), HostCopies(device, scratch=True)

    def offload(self, *, keep_weights: bool = False, timed: Timer = untimed) -> None:
        """Move the state to host memory, and free its device memory and the memory of the last update.
        ``keep_weights``: the weights stay, and can be sent. ``timed`` gets the phases of `HostCopies.offload`
        and `release_cache`.
        """
        parameters = list(self._engine.module.parameters())
        weights = [t for p in parameters for t in _parts(p)]
        kept_ids = {storage._cdata for storage in storages(weights, self._device)}
        self._scratch.offload(self._buckets())
        rest = (t for t in self._state_tensors(parameters) if t.untyped_storage()._cdata not in kept_ids)
        self._rest.offload(rest, timed)
        if not keep_weights:
            # Under ZeRO-3 only this rank's part: each gather allocates small full parameters elsewhere.
            self._frozen.offload((_parts(p)[-1] for p in parameters if not p.requires_grad), timed)
            self._weights.offload(weights, timed)
        release_cache(timed)

    def reload(self, *, only_weights: bool = False) -> None:
        """Undo `offload`; ``only_weights``: only for the weights to send."""
        for copies in (self._frozen, self._weights):
            copies.reload()
        if not only_weights:
            self._rest.reload()
            self._scratch.reload()

    def _buckets(self) -> Iterator[Tensor]:
        """Yield DeepSpeed's communication buffers of gradients, empty between two updates."""
        for bucket in getattr(self._engine.optimizer, "ipg_buckets", {}).values():
            yield from tensors_in(bucket.buffer)

    def _state_tensors(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield gradients and every tensor of the optimizer, and of the optimizer that it wraps."""
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
