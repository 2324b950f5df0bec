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

_ROW = 128  # words that a checksum adds up at once
_PART = 1 << 26  # bytes that a checksum takes at once, which bounds its temporary memory
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as a signed number


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
    def from_tensor(cls, name: str, tensor: Tensor, shape: Sequence[int] | None = None) -> ParameterSpec:
        """``shape`` overrides the tensor's, which is empty while ZeRO-3 shards it."""
        return cls(
            name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape if shape is None else shape)
        )


def make_buckets(specs: Sequence[ParameterSpec], bucket_bytes: int) -> list[list[ParameterSpec]]:
    """Split ``specs``, in order, into buckets of at most ``bucket_bytes`` or of one larger parameter."""
    buckets: list[list[ParameterSpec]] = []
    free_bytes = 0
    for spec in specs:
        if not buckets or spec.num_bytes > free_bytes:
            buckets.append([])
            free_bytes = bucket_bytes
        buckets[-1].append(spec)
        free_bytes -= spec.num_bytes
    return buckets


def pack(tensors: Iterable[Tensor], flat: Tensor) -> None:
    """Fill ``flat`` uint8 [N] with the bytes of ``tensors``, end to end. Raises ValueError unless they are N
    bytes.
    """
    offset = 0
    for tensor in tensors:
        piece = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if offset + len(piece) > len(flat):
            raise ValueError(f"the tensors have more than the {len(flat)} bytes of their bucket")
        flat[offset : offset + len(piece)].copy_(piece)
        offset += len(piece)
    if offset != len(flat):
        raise ValueError(f"the tensors have {offset} bytes and their bucket {len(flat)}")


def bucket_size(bucket: Sequence[ParameterSpec]) -> int:
    return sum(spec.num_bytes for spec in bucket)


def unpack(flat: Tensor, bucket: Sequence[ParameterSpec]) -> list[tuple[str, Tensor]]:
    """Return the named tensors in ``flat`` uint8 [N]. Tensors that start on a multiple of their element size
    are views of it.
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
    """A checksum of all bytes added, in order: detects changed, missing, repeated and moved ones.

    The bytes are taken as 32-bit words in rows of 128. A row's words are weighted by column and added up
    modulo 2^32, the rows by their number modulo 2^64: plain integer arithmetic, the same on every device, and
    about as fast as memory. All weights are odd, so that no change of a single word is lost. It cannot detect
    a swap of two numbers in one row that differ in their sign alone.
    """

    NUM_BYTES = 8  # size of `view_bytes`

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._weights = _odd_weights(_ROW).to(torch.int32)

    def add(self, flat: Tensor) -> None:
        """Add ``flat`` uint8 [N], without waiting for the device."""
        value = torch.zeros((), dtype=torch.int64, device=flat.device) if self._value is None else self._value
        weights = self._weights.to(flat.device)
        for part in flat.split(_PART):
            words = _words(part)
            if flat.device.type == "cpu":
                rows = words.mv(weights)  # one pass over memory; on GPUs there is none for integers
            else:
                rows = (words * weights).sum(1, dtype=torch.int32)
            value = (value + len(part)) * _STEP + (rows * _odd_weights(len(rows), flat.device)).sum()
        self._value = value

    @property
    def value(self) -> int:
        """Non-negative, below 2^64."""
        return 0 if self._value is None else self.read(self.view_bytes())

    def view_bytes(self) -> Tensor:
        """Return the value as uint8 [8], to send after the data."""
        assert self._value is not None, "nothing was added"
        return self._value.reshape(1).view(torch.uint8)

    @staticmethod
    def read(flat: Tensor) -> int:
        """Return the value whose `view_bytes` are ``flat``."""
        return int(flat.clone().view(torch.int64)) % (1 << 64)


def _words(flat: Tensor) -> Tensor:
    """Return rows of int32 [R, 128] that hold ``flat`` uint8 [N], the last one padded with zeros."""
    short = -len(flat) % (4 * _ROW)
    if short or flat.storage_offset() % 4:
        flat = torch.cat([flat, flat.new_zeros(short)])
    return flat.view(torch.int32).view(-1, _ROW)


def _odd_weights(count: int, device: torch.device | None = None) -> Tensor:
    """Return int64 [count], odd and all different, without a repeating pattern."""
    return (torch.arange(count, device=device) * _STEP) | 1
