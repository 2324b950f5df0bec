"""Bitwise deltas from the last sent weights, and how to apply them.

At learning rates of reinforcement learning most updates are smaller than half a unit in the last place of
a bfloat16 weight, which then keeps its bits (arXiv 2602.03839). A delta has the changed 16-bit words of a
bucket:

    held     3f80 3f81 0000 bf80
    new      3f80 3f82 0000 bf81
    delta    words 3f82 bf81, gaps 1 1        1 unchanged word before each

Words are absolute, so applying a delta twice changes nothing. A gap of 255 and more takes several bytes. A
bucket is sent whole if its delta exceeds half its size, or more than half its groups of four words changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_dist.policy.weight_buckets import Checksum, ParameterSpec, bucket_size, make_buckets, pack, unpack
from grpo_dist.runtime.metering import Stopwatch

_WORD = 2  # bytes
_LONGEST = 255  # byte of a gap that the next byte continues
_ALIGNED = 64  # bytes, alignment of buckets in `HeldWeights`
_WHOLE = -1
_PINNED = 2**32  # bytes pinned at once, at most: torch rounds each such block up to a power of two


@dataclass(frozen=True, slots=True)
class BucketDelta:
    """The changes of one bucket.

    Attributes:
        changed: words that differ.
        data: uint8, their new values and the gaps before them; None: the bucket is sent whole.
    """

    changed: int
    data: Tensor | None

    @property
    def key(self) -> tuple[int, int]:
        """What a receiver needs before ``data`` arrives: words in it (-1: a whole bucket), and bytes."""
        return (_WHOLE, 0) if self.data is None else (self.changed, len(self.data))


def difference(old: Tensor, new: Tensor) -> BucketDelta:
    """Return what turns ``old`` uint8 [8 N] into ``new`` uint8 [8 N], both on one device."""
    # Most groups of four words are equal: split only the unequal groups.
    old_words, new_words = old.view(torch.int64), new.view(torch.int64)
    group = (old_words != new_words).nonzero().squeeze(1)
    if 2 * len(group) > len(new_words):
        return BucketDelta(int((old.view(torch.int16) != new.view(torch.int16)).count_nonzero()), None)
    words = new_words[group].view(torch.int16)
    differs = (old_words[group].view(torch.int16) != words).nonzero().squeeze(1)
    positions = (group[differs >> 2] << 2) + (differs & 3)
    gaps = _encoded(positions.diff(prepend=positions.new_full((1,), -1)) - 1)
    if 2 * (len(positions) * _WORD + len(gaps)) > len(new):
        return BucketDelta(len(positions), None)
    return BucketDelta(len(positions), torch.cat([words[differs].view(torch.uint8), gaps]))


def apply(data: Tensor, words: int, flat: Tensor) -> bool:
    """Write the ``words`` of a delta's ``data`` into ``flat`` uint8 [2 W], on the same device.

    Returns False, with ``flat`` unchanged, for data that `difference` cannot have made.
    """
    gaps = data[words * _WORD :]
    ends = gaps < _LONGEST
    positions = (torch.cumsum(gaps.long() + ends, 0) - 1)[ends]
    target = flat.view(torch.int16)
    if len(positions) != words or (words and int(positions[-1]) >= len(target)):
        return False
    target[positions] = _align(data[: words * _WORD]).view(torch.int16)
    return True


def _encoded(gaps: Tensor) -> Tensor:
    """Return ``gaps`` int64 [N] as bytes: for each gap, one 255 per multiple of 255, then the remainder.

    [1, 255, 600] -> [1, 255, 0, 255, 255, 90]
    """
    full = gaps // _LONGEST
    ends = torch.cumsum(full + 1, 0) - 1
    size = int(ends[-1]) + 1 if len(ends) else 0
    coded = torch.full((size,), _LONGEST, dtype=torch.uint8, device=gaps.device)
    coded[ends] = (gaps % _LONGEST).to(torch.uint8)
    return coded


def _align(data: Tensor) -> Tensor:
    return data.clone() if data.data_ptr() % _WORD else data


class HeldWeights:
    """One copy of all weights in the dtypes in which they are sent, in host memory, bucket by bucket.

    Attributes:
        token: names the weights; two copies with the same token are equal. None while they change.
        slots: the memory of each bucket, uint8, in multiples of 64 bytes.
    """

    token: str | None

    def __init__(self, specs: Sequence[ParameterSpec], bucket_bytes: int, *, pinned: bool = False) -> None:
        self.specs, self.bucket_bytes, self.token = tuple(specs), bucket_bytes, None
        self.buckets = make_buckets(specs, bucket_bytes)
        slots = [-(-bucket_size(bucket) // _ALIGNED) * _ALIGNED for bucket in self.buckets]
        # Zeros from a bucket's end to its slot's end.
        blocks = _join_sizes(slots, _PINNED) if pinned else [slots]
        memory = [torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=pinned) for sizes in blocks]
        self.slots = [s for sizes, block in zip(blocks, memory, strict=True) for s in block.split(sizes)]

    def __len__(self) -> int:
        return len(self.buckets)

    def are(self, specs: Sequence[ParameterSpec], bucket_bytes: int) -> bool:
        """Return whether the weights of ``specs`` fit into this copy."""
        return self.specs == tuple(specs) and self.bucket_bytes == bucket_bytes

    @property
    def num_bytes(self) -> int:
        return sum(bucket_size(bucket) for bucket in self.buckets)

    def flat(self, index: int) -> Tensor:
        """Return the bytes of a bucket, as they are sent whole."""
        return self.slots[index][: bucket_size(self.buckets[index])]

    def named(self, index: int) -> list[tuple[str, Tensor]]:
        """Return the tensors of a bucket, views of the copy where their alignment allows it."""
        return unpack(self.flat(index), self.buckets[index])

    def weights(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the tensors of every bucket."""
        return (self.named(i) for i in range(len(self)))

    def checksum(self) -> Checksum:
        """Return the checksum of the whole copy, as for a full transfer."""
        checksum = Checksum()
        for i in range(len(self)):
            checksum.add(self.flat(i))
        return checksum


def _join_sizes(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Group ``sizes``, in order, into lists with a sum of at most ``most``, or of one larger size.

    [3, 4, 9, 1, 1], 8 -> [[3, 4], [9], [1, 1]]
    """
    lists: list[list[int]] = []
    for size in sizes:
        if lists and sum(lists[-1]) + size <= most:
            lists[-1].append(size)
        else:
            lists.append([size])
    return lists


@dataclass(frozen=True)
class Changes:
    """What turns the weights ``base`` into the weights ``token``.

    Attributes:
        base: token of the previous weights; None: there were none, only whole weights can be sent.
        deltas: one per bucket, in order.
        checksum: checksum of all bytes of the new weights.
        seconds: duration of each stage of `SentWeights.take`, by metric.
    """

    token: str
    base: str | None
    deltas: tuple[BucketDelta, ...]
    checksum: Checksum
    num_bytes: int
    seconds: dict[str, float]

    @property
    def changed_share(self) -> float:
        """Share of all weights' 16-bit words that differ from the last sent weights; 1 without any."""
        return 1.0 if self.base is None else 2 * sum(d.changed for d in self.deltas) / self.num_bytes


class SentWeights:
    """A copy of the last taken weights, in host memory, page-locked if the weights are on a GPU."""

    def __init__(self) -> None:
        self.held: HeldWeights | None = None
        self.changes: Changes | None = None

    def take(
        self,
        weights: Iterable[list[tuple[str, Tensor]]],
        specs: list[ParameterSpec],
        bucket_bytes: int,
        device: torch.device,
        token: str,
    ) -> Changes:
        """Copy ``weights``, the buckets of ``specs`` in order, as ``token``; return their changes.

        Compares on ``device``, bucket by bucket. After an error the copy is incomplete and cannot be a base.
        """
        copy, watch, checksum = self._copy(specs, bucket_bytes, device), Stopwatch(), Checksum()
        base, copy.token, self.changes = copy.token, None, None
        scratch = torch.zeros(max(map(len, copy.slots), default=0), dtype=torch.uint8, device=device)
        deltas, buckets = [], iter(weights)
        for slot, bucket in zip(copy.slots, copy.buckets, strict=True):
            with watch("sync_gather"):
                tensors = next(buckets)
            with watch("sync_pack"):
                size = bucket_size(bucket)
                new = scratch[: len(slot)]
                pack((tensor for _, tensor in tensors), new[:size])
                new[size:] = 0
            with watch("sync_compare"):
                old = slot.to(device, non_blocking=True)
                delta = BucketDelta(0, None) if base is None else difference(old, new)
                if delta.changed or base is None:
                    slot.copy_(new)
            with watch("sync_checksum"):
                checksum.add(new[:size])
            # In host memory: deltas live through the next update, which needs the device's memory.
            deltas.append(replace(delta, data=None if delta.data is None else delta.data.cpu()))
        next(buckets, None)  # releases what the last bucket gathered
        copy.token = token
        self.changes = Changes(token, base, tuple(deltas), checksum, copy.num_bytes, watch.phases())
        return self.changes

    def _copy(self, specs: list[ParameterSpec], bucket_bytes: int, device: torch.device) -> HeldWeights:
        if self.held is None or not self.held.are(specs, bucket_bytes):
            self.held = None  # freed before the next copy is allocated
            self.held = HeldWeights(specs, bucket_bytes, pinned=device.type == "cuda")
        return self.held
