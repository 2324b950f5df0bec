"""Send and receive weights: buckets over a transport, then a checksum of all bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from torch import Tensor

from actors.transfer.broadcasts import Transport
from grpo_dist.policy.weight_buckets import Checksum, ParameterSpec, bucket_size, make_buckets, pack, unpack
from grpo_dist.runtime.metering import Stopwatch

Bucket = list[tuple[str, Tensor]]


def send(
    transport: Transport | None,
    weights: Iterable[Bucket],
    specs: Sequence[ParameterSpec],
    bucket_bytes: int,
) -> dict[str, float]:
    """Send ``weights``, the buckets of ``specs``; return the bytes sent and the seconds of each stage.

    Without a transport the buckets are only iterated: under ZeRO-3 every rank takes part in gathering what
    another rank sends. After a failure the remaining buckets are iterated, too.
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
        next(buffers, None)  # sends the last buffer and waits for all
    return {"sync/bytes": float(sum(sizes[:-1]))} | watch.phases()


def receive(transport: Transport, specs: Sequence[ParameterSpec], bucket_bytes: int) -> Iterator[Bucket]:
    """Yield the buckets of `send`, each valid until the next is requested.

    Raises RuntimeError after the last one when the checksums differ.
    """
    buckets = make_buckets(specs, bucket_bytes)
    return map(unpack, receive_flat(transport, specs, bucket_bytes), buckets)


def receive_flat(transport: Transport, specs: Sequence[ParameterSpec], bucket_bytes: int) -> Iterator[Tensor]:
    """Yield the bytes of the buckets of `send`; see `receive`."""
    checksum, sizes = Checksum(), _sizes(specs, bucket_bytes)
    arriving = transport.incoming(sizes)
    for _ in sizes[:-1]:
        flat = next(arriving)
        checksum.add(flat)
        yield flat
    expected = Checksum.read(next(arriving))
    next(arriving, None)  # acknowledges the checksum
    if expected != checksum.value:
        raise RuntimeError(
            f"weight sync: received bytes with checksum {checksum.value}, the policy sent {expected}"
        )


def _sizes(specs: Sequence[ParameterSpec], bucket_bytes: int) -> list[int]:
    """Return the bytes of all buckets and of the checksum after them."""
    return [bucket_size(bucket) for bucket in make_buckets(specs, bucket_bytes)] + [Checksum.NUM_BYTES]
