"""Send and receive what changed in the weights, over any transport.

    sender                                 receiver, which holds the weights `base`
    table: words and bytes of each bucket,
           checksum of the new weights  -> sizes of what follows
    changed buckets                     -> write into the copy
                                           compare the checksum of the whole copy

The table has a fixed size, so both ends know it; the buckets without changes are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from actors.transfer.broadcasts import Transport
from actors.transfer.stream import receive_flat
from grpo_dist.policy.sent_weights import Changes
from grpo_dist.policy.weight_buckets import Checksum
from grpo_dist.policy.weight_deltas import HeldWeights, apply
from grpo_dist.runtime.metering import Stopwatch

_ROW = 16  # bytes of a bucket in the table: two int64


def send_changes(transport: Transport, changes: Changes, held: HeldWeights) -> dict[str, float]:
    """Send ``changes``, after which ``held`` has the new weights. Return the bytes sent and the seconds of
    each stage.
    """
    watch = Stopwatch()
    keys = [delta.key for delta in changes.deltas]
    rows = torch.tensor(keys, dtype=torch.int64).view(torch.uint8).view(-1)
    with watch("sync_wait"):
        for flat in transport.outgoing([len(rows) + Checksum.NUM_BYTES]):
            flat.copy_(torch.cat([rows, changes.checksum.as_bytes().cpu()]))
    sent = _sent(keys, held)
    buffers = transport.outgoing(list(sent.values())) if sent else iter(())
    for i in sent:
        with watch("sync_wait"):
            flat = next(buffers)
        with watch("sync_pack"):
            data = changes.deltas[i].data
            flat.copy_(held.flat(i) if data is None else data)
    with watch("sync_wait"):
        next(buffers, None)  # sends the last buffer and waits for all
    return {"sync/bytes": float(len(rows) + Checksum.NUM_BYTES + sum(sent.values()))} | watch.phases()


def receive_changes(transport: Transport, held: HeldWeights) -> set[str] | None:
    """Apply what `send_changes` sends to ``held``, and return the names of the tensors that changed.

    None: the checksum of the copy is not that of the sender's weights, or a delta is malformed; ``held`` is
    then of no use. ``held.token`` is None afterwards. Raises RuntimeError for a table that no sender can have
    made.
    """
    held.token = None
    keys, expected = _table(transport, held)
    sent, changed, intact = _sent(keys, held), set[str](), True
    arriving = transport.incoming(list(sent.values())) if sent else iter(())
    for i in sent:
        data, at = next(arriving).to("cpu"), None
        if keys[i][0] < 0:
            held.flat(i).copy_(data)
        elif (at := apply(data, keys[i][0], held.slots[i])) is None:
            intact = False
        changed |= held.names(i, at)
    next(arriving, None)  # acknowledges the last bucket
    return changed if intact and held.checksum().value == expected else None


def receive_whole(transport: Transport, held: HeldWeights) -> Iterator[list[tuple[str, Tensor]]]:
    """Copy what `stream.send` sends into ``held``; yield the tensors of each bucket once it has arrived.

    Raises RuntimeError after the last one when the checksums differ. ``held.token`` is None meanwhile.
    """
    held.token = None
    for i, flat in enumerate(receive_flat(transport, held.specs, held.bucket_bytes)):
        held.flat(i).copy_(flat)
        yield held.named(i)


def _table(transport: Transport, held: HeldWeights) -> tuple[list[tuple[int, int]], int]:
    """Receive the key of each bucket's delta, and the checksum of the new weights."""
    size = _ROW * len(held) + Checksum.NUM_BYTES
    (received,) = [flat.to("cpu", copy=True) for flat in transport.incoming([size])]
    rows = received[: -Checksum.NUM_BYTES].view(torch.int64).view(-1, 2).tolist()
    for i, (words, num_bytes) in enumerate(rows):
        if words < -1 or not 2 * max(words, 0) <= num_bytes <= len(held.slots[i]):
            what = f"{words} words in {num_bytes} bytes of bucket {i}"
            raise RuntimeError(f"weight sync: the table of changes is malformed: {what}")
    return [(words, num_bytes) for words, num_bytes in rows], Checksum.read(received[-Checksum.NUM_BYTES :])


def _sent(keys: Sequence[tuple[int, int]], held: HeldWeights) -> dict[int, int]:
    """Return the bytes of each bucket that is sent."""
    sizes = {i: len(held.flat(i)) if words < 0 else size for i, (words, size) in enumerate(keys)}
    return {i: size for i, size in sizes.items() if size}
