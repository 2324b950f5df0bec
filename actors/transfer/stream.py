"""Weights on their way: buckets over a transport, and at the end the checksum of every byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from torch import Tensor

from actors.transfer.transport import Transport
from grpo_dist.policy.weight_buckets import Checksum, ParameterSpec, bucket_size, make_buckets, pack, unpack
from grpo_dist.runtime.metering import Stopwatch

Bucket = list[tuple[str, Tensor]]


def send(
    transport: Transport | None,
    weights: Iterable[Bucket],
    specs: Sequence[ParameterSpec],
    bucket_bytes: int,
) -> dict[str, float]:
    """Send ``weights``, the buckets of ``specs``; returns the bytes sent and the seconds of each stage.

    Without a transport they are only gone through: under ZeRO-3 every rank takes part in gathering what
    others send. So do those that follow a send that fails.
    """
    weights = iter(weights)
    try:
        return _send(transport, weights, specs, bucket_bytes) if transport else {}
    finally:
        for _ in weights:
            pass


def _send(
    transport: Transport, weights: Iterator[Bucket], specs: Sequence[ParameterSpec], bucket_bytes: int
) -> dict[str, float]:
    checksum, watch = Checksum(), Stopwatch()
    sizes = _sizes(specs, bucket_bytes)
    buffers, buckets = transport.outgoing(sizes), chain(weights, [None])
    for _ in sizes:
        with watch("sync_wait"):
            flat = next(buffers)
        with watch("sync_gather"):
            bucket = next(buckets)
        if bucket is None:
            flat.copy_(checksum.as_bytes())
            break
        with watch("sync_pack"):
            pack((tensor for _, tensor in bucket), flat)
        with watch("sync_checksum"):
            checksum.add(flat)
    with watch("sync_wait"):
        next(buffers, None)  # the last one leaves, and all have arrived
    return {"sync/bytes": float(sum(sizes[:-1]))} | watch.phases()


def receive(transport: Transport, specs: Sequence[ParameterSpec], bucket_bytes: int) -> Iterator[Bucket]:
    """The buckets that `send` sends, each valid until the next is asked for.

    Raises RuntimeError after the last one when other bytes came than were sent.
    """
    checksum = Checksum()
    arriving = transport.incoming(_sizes(specs, bucket_bytes))
    for bucket in make_buckets(specs, bucket_bytes):
        flat = next(arriving)
        checksum.add(flat)
        yield unpack(flat, bucket)
    expected = Checksum.read(next(arriving))
    next(arriving, None)  # says that it was read
    if expected != checksum.value:
        raise RuntimeError(
            f"weight sync: received bytes with checksum {checksum.value}, the policy sent {expected}"
        )


def _sizes(specs: Sequence[ParameterSpec], bucket_bytes: int) -> list[int]:
    """Of all buckets and of the checksum behind them, bytes."""
    return [bucket_size(bucket) for bucket in make_buckets(specs, bucket_bytes)] + [Checksum.NUM_BYTES]
