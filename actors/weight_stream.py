"""Weights on their way: buckets over a transport, and at the end the checksum of every byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from actors.transport import Transport
from grpo_dist.weight_buckets import Checksum, ParameterSpec, bucket_size, make_buckets, pack, unpack


def send(transport: Transport | None, buckets: Iterable[list[tuple[str, Tensor]]]) -> int:
    """Broadcast ``buckets``; returns the bytes sent. Without a transport they are only gone through: under
    ZeRO-3 every rank takes part in gathering what rank 0 sends.
    """
    checksum, sent = Checksum(), 0
    for bucket in buckets:
        if transport is None:
            continue
        flat = pack(tensor for _, tensor in bucket).to(transport.device)
        transport.broadcast(flat)
        checksum.add(flat)
        sent += len(flat)
    if transport is not None:
        transport.broadcast(checksum.as_tensor(transport.device))
    return sent


def receive(
    transport: Transport, specs: Sequence[ParameterSpec], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """The buckets that `send` broadcasts, each in a buffer of its own: vLLM's layerwise reload keeps what it
    was given until a layer is complete.

    Raises RuntimeError after the last one when other bytes came than were sent.
    """
    checksum = Checksum()
    for bucket in make_buckets(specs, bucket_bytes):
        flat = torch.empty(bucket_size(bucket), dtype=torch.uint8, device=transport.device)
        transport.broadcast(flat)
        checksum.add(flat)
        yield unpack(flat, bucket)
    expected = torch.empty(1, dtype=torch.int64, device=transport.device)
    transport.broadcast(expected)
    if int(expected) != checksum.value:
        raise RuntimeError(
            f"weight sync: received bytes with checksum {checksum.value}, the policy sent {int(expected)}"
        )
