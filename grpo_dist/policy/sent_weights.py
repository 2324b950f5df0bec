"""The sending side of weight deltas: the weights as they were last sent, and what has changed since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_dist.policy.weight_buckets import Checksum, ParameterSpec, bucket_size, pack
from grpo_dist.policy.weight_deltas import BucketDelta, HeldWeights, difference
from grpo_dist.runtime.metering import Stopwatch


@dataclass(frozen=True)
class Changes:
    """What turns the weights ``base`` into the weights ``token``.

    Attributes:
        base: token of the weights before; None: there were none, only whole weights can be sent.
        deltas: of each bucket, in order.
        checksum: of all bytes of the new weights.
        seconds: of each stage of finding them, by metric.
    """

    token: str
    base: str | None
    deltas: tuple[BucketDelta, ...]
    checksum: Checksum
    num_bytes: int
    seconds: dict[str, float]

    @property
    def changed_share(self) -> float:
        """Share of the 16-bit words of all weights whose bits differ from those last sent; 1 without any."""
        return 1.0 if self.base is None else 2 * sum(d.changed for d in self.deltas) / self.num_bytes


class SentWeights:
    """The weights last taken. The copy is in host memory, page-locked where the weights are on a GPU."""

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
        """Copy ``weights``, the buckets of ``specs`` in order, as ``token``; return what has changed in them.

        They are compared on ``device``, bucket by bucket. After an error the copy is no base, because it is
        not whole.
        """
        held, watch, checksum = self._copy(specs, bucket_bytes, device), Stopwatch(), Checksum()
        base, held.token, self.changes = held.token, None, None
        scratch = torch.zeros(max(map(len, held.slots), default=0), dtype=torch.uint8, device=device)
        deltas, buckets = [], iter(weights)
        for slot, bucket in zip(held.slots, held.buckets, strict=True):
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
            # In host memory: they are kept through the next update, whose memory they would take.
            deltas.append(replace(delta, data=None if delta.data is None else delta.data.cpu()))
        next(buckets, None)  # releases what the last bucket gathered
        held.token = token
        self.changes = Changes(token, base, tuple(deltas), checksum, held.num_bytes, watch.phases())
        return self.changes

    def _copy(self, specs: list[ParameterSpec], bucket_bytes: int, device: torch.device) -> HeldWeights:
        if self.held is None or not self.held.are(specs, bucket_bytes):
            self.held = None  # freed before another is made
            self.held = HeldWeights(specs, bucket_bytes, pinned=device.type == "cuda")
        return self.held
