"""Packing a model's parameters into flat buckets and back, with a checksum over every byte.

Sender and receiver derive the same buckets from the same list of specs, so only bytes travel:

    specs   a[6 bytes] b[2] c[8] d[4], buckets of 8 bytes  ->  [a b] [c] [d]

A parameter larger than a bucket travels alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements of a checksum taken at once, so that its int64 copy stays small


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Name as in a Hugging Face checkpoint, element type as torch calls it ("bfloat16"), and full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor, shape: Sequence[int] | None = None) -> ParameterSpec:
        """``shape`` overrides the tensor's own, which is empty while ZeRO-3 holds it in parts."""
        return cls(
            name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape if shape is None else shape)
        )


def make_buckets(specs: Sequence[ParameterSpec], bucket_bytes: int) -> list[list[ParameterSpec]]:
    """Specs in order, cut so that a bucket holds at most ``bucket_bytes`` or a single larger parameter."""
    buckets: list[list[ParameterSpec]] = []
    room = 0
    for spec in specs:
        if not buckets or spec.num_bytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(spec)
        room -= spec.num_bytes
    return buckets


def pack(tensors: Iterable[Tensor]) -> Tensor:
    """One uint8 tensor [N bytes] holding ``tensors`` end to end."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])


def bucket_size(bucket: Sequence[ParameterSpec]) -> int:
    return sum(spec.num_bytes for spec in bucket)


def unpack(flat: Tensor, bucket: Sequence[ParameterSpec]) -> list[tuple[str, Tensor]]:
    """The named tensors in ``flat`` uint8 [N]. Those that start on a multiple of their element size are views
    of it.
    """
    named, offset = [], 0
    for spec in bucket:
        piece = flat[offset : offset + spec.num_bytes]
        if offset % spec.torch_dtype.itemsize:
            piece = piece.clone()
        named.append((spec.name, piece.view(spec.torch_dtype).view(spec.shape)))
        offset += spec.num_bytes
    return named


class Checksum:
    """Position-weighted sum of all bytes added, modulo 2^63: notices changed, swapped, missing and repeated
    bytes.

    Plain integer arithmetic, so the result is the same on every device.
    """

    def __init__(self) -> None:
        self._value, self._position = 0, 0

    def add(self, flat: Tensor) -> None:
        for part in flat.split(_CHUNK):
            # Weights repeat after a prime number of bytes: small enough never to overflow the sum of a chunk.
            weight = (torch.arange(len(part), device=part.device) + self._position) % 65521 + 1
            self._value = (self._value * 31 + int((part.to(torch.int64) * weight).sum())) % (1 << 63)
            self._position += len(part)

    @property
    def value(self) -> int:
        """Non-negative, below 2^63."""
        return self._value

    def as_tensor(self, device: torch.device) -> Tensor:
        """int64 [1], to travel beside the bytes."""
        return torch.tensor([self._value], dtype=torch.int64, device=device)
