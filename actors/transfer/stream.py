"""Send and receive weights over any transport: all buckets, then a checksum; or only changes.

    sender of changes                      receivers, which hold the weights `base`
    table: words and bytes of each bucket,
           checksum of the new weights,
           checksum of the table        -> compare the checksum; read the sizes of the changes
    all agree that the table is intact  <> otherwise the transfer ends here for all
    changed buckets                     -> write into the copy
                                           compare the checksum of the whole copy

Both ends know the table's size; unchanged buckets are not sent. A receiver with a corrupt table does not know
the sizes that follow, and a broadcast waits for every receiver. So all receivers stop, and the caller sends
whole weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from actors.transfer.transport import Transport
from grpo_dist.policy.weight_buckets import Checksum, ParameterSpec, bucket_size, make_buckets, pack, unpack
from grpo_dist.policy.weight_deltas import Changes, HeldWeights, apply
from grpo_dist.runtime.metering import Stopwatch

Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class HeldTransfer:
    """The weights that engines' copies hold after a transfer, and what it sends.

    Attributes:
        token: identifies the new weights.
        base: token of the weights that the changes apply to; None: whole weights are sent.
    """

    token: str
    base: str | None = None


def held_token(worker: Any) -> str | None:
    """Return the token of the copy that vLLM's ``worker`` holds, if any."""
    held = worker.weight_transfer_engine.held
    return None if held is None else held.token


def send(
    transport: Transport | None,
    weights: Iterable[Bucket],
    specs: Sequence[ParameterSpec],
    bucket_bytes: int,
) -> dict[str, float]:
    """Send ``weights``, the buckets of ``specs``; return the bytes sent and the seconds of each stage.

    Without a transport, only iterates the buckets: under ZeRO-3 every rank takes part in gathering the
    weights that another rank sends. After a failure, iterates the remaining buckets, too.
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
            flat.copy_(checksum.view_bytes())
            break
        with watch("sync_pack"):
            pack((tensor for _, tensor in bucket), flat)
        with watch("sync_checksum"):
            checksum.add(flat)
    with watch("sync_wait"):
        next(buffers, None)  # sends the last buffer and waits for all buffers
    return {"sync/bytes": float(sum(sizes[:-1]))} | watch.phases()


def receive(transport: Transport, specs: Sequence[ParameterSpec], bucket_bytes: int) -> Iterator[Bucket]:
    """Yield the buckets of `send`, each valid until the next is requested.

    Raises RuntimeError after the last bucket if the checksums differ.
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
    """Return the bytes of each bucket and of the checksum after them."""
    return [bucket_size(bucket) for bucket in make_buckets(specs, bucket_bytes)] + [Checksum.NUM_BYTES]


_ROW = 16  # bytes per bucket in the table: two int64
_CHECKSUMS = 2 * Checksum.NUM_BYTES  # after the rows: checksums of the new weights and of the table


def send_changes(transport: Transport, changes: Changes, copy: HeldWeights) -> dict[str, float]:
    """Send ``changes``, whose new weights are in ``copy``; return the bytes sent and the seconds of each
    stage. Stops after the table if a receiver finds it damaged.
    """
    watch = Stopwatch()
    keys = [delta.key for delta in changes.deltas]
    table = _packed(keys, changes.checksum)
    with watch("sync_wait"):
        for flat in transport.outgoing([len(table)]):
            flat.copy_(table)
        agreed = transport.agree(True)
    sizes = _changed_sizes(keys, copy) if agreed else {}
    buffers = transport.outgoing(list(sizes.values())) if sizes else iter(())
    for i in sizes:
        with watch("sync_wait"):
            flat = next(buffers)
        with watch("sync_pack"):
            data = changes.deltas[i].data
            flat.copy_(copy.flat(i) if data is None else data)
    with watch("sync_wait"):
        next(buffers, None)  # sends the last buffer and waits for all buffers
    return {"sync/bytes": float(len(table) + sum(sizes.values()))} | watch.phases()


def receive_changes(transport: Transport, copy: HeldWeights) -> bool:
    """Apply the changes of `send_changes` to ``copy``; return whether it now has the sender's weights.

    False: the table was damaged in transit, a delta is malformed, or the checksums of the copy and the
    sender's weights differ; ``copy`` is then unusable. ``copy.token`` is None afterwards.
    """
    copy.token = None
    table = _receive_table(transport, copy)
    if not transport.agree(table is not None) or table is None:
        return False
    keys, expected = table
    sizes, intact = _changed_sizes(keys, copy), True
    arriving = transport.incoming(list(sizes.values())) if sizes else iter(())
    for i in sizes:
        data = next(arriving).to("cpu")
        if keys[i][0] < 0:
            copy.flat(i).copy_(data)
        else:
            intact &= apply(data, keys[i][0], copy.slots[i])
    next(arriving, None)  # acknowledges the last bucket
    return intact and copy.checksum().value == expected


def receive_whole(transport: Transport, copy: HeldWeights) -> Iterator[list[tuple[str, Tensor]]]:
    """Receive the weights of `stream.send` into ``copy``; yield the tensors of each bucket once it arrives.

    Raises RuntimeError after the last bucket if the checksums differ. Sets ``copy.token`` to None.
    """
    copy.token = None
    for i, flat in enumerate(receive_flat(transport, copy.specs, copy.bucket_bytes)):
        copy.flat(i).copy_(flat)
        yield copy.named(i)


def _packed(keys: Sequence[tuple[int, int]], checksum: Checksum) -> Tensor:
    """Return the uint8 table: each bucket's delta key, checksums of the new weights and of the table."""
    rows = torch.tensor(keys, dtype=torch.int64).view(torch.uint8).view(-1)
    return _add_checksum(torch.cat([rows, checksum.view_bytes().cpu()]))


def _add_checksum(flat: Tensor) -> Tensor:
    checksum = Checksum()
    checksum.add(flat)
    return torch.cat([flat, checksum.view_bytes()])


def _receive_table(transport: Transport, copy: HeldWeights) -> tuple[list[tuple[int, int]], int] | None:
    """Receive the key of each bucket's delta, and the checksum of the new weights. None: the table is corrupt
    or not from a sender.
    """
    size = _ROW * len(copy) + _CHECKSUMS
    (received,) = [flat.to("cpu", copy=True) for flat in transport.incoming([size])]
    content = received[: -Checksum.NUM_BYTES]
    if not torch.equal(_add_checksum(content), received):
        return None
    rows = content[: -Checksum.NUM_BYTES].view(torch.int64).view(-1, 2).tolist()
    for i, (words, num_bytes) in enumerate(rows):
        if words < -1 or not 2 * max(words, 0) <= num_bytes <= len(copy.slots[i]):
            return None
    return [(words, num_bytes) for words, num_bytes in rows], Checksum.read(content[-Checksum.NUM_BYTES :])


def _changed_sizes(keys: Sequence[tuple[int, int]], copy: HeldWeights) -> dict[int, int]:
    """Return the bytes to send for each changed bucket, by index."""
    sizes = {i: len(copy.flat(i)) if words < 0 else size for i, (words, size) in enumerate(keys)}
    return {i: size for i, size in sizes.items() if size}
