"""What a policy rank does to give its weights to others: transfer groups, and snapshots in files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.transfer.broadcasts import Transport
from actors.transfer.connections import Seat
from actors.transfer.delta_stream import send_changes
from actors.transfer.stream import send
from actors.transfer.transport import open_transport
from grpo_dist.config import TransferBackend
from grpo_dist.policy.snapshots import SnapshotWriter
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.policy.weight_deltas import SentWeights
from grpo_dist.runtime.hardware import one_thread
from grpo_dist.runtime.metering import Metered, metered


@dataclass(frozen=True, slots=True)
class Taken:
    """Weights that a rank has copied to send them.

    Attributes:
        base: token of those copied before; None: there were none.
        metrics: what has changed since, and the seconds of each stage.
    """

    base: str | None
    metrics: dict[str, float]


class WeightSender(Metered):
    """The part of a `PolicyWorker` that sends its weights. All ranks are called at once."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Any = None
        self._transports: dict[str, Transport] = {}
        self._snapshots = SnapshotWriter()
        self._sent = SentWeights()

    def parameter_specs(self, adapters_only: bool = False, as_held: bool = False) -> list[ParameterSpec]:
        return self._trainer.weights.specs(adapters_only=adapters_only, as_held=as_held)

    def open_transfer(self, group: str, backend: TransferBackend, seat: Seat, timeout_s: float) -> None:
        self.close_transfer(group)
        self._transports[group] = open_transport(backend, seat, timeout_s=timeout_s)

    def close_transfer(self, group: str) -> None:
        """Leave the group, if this rank is in it."""
        if transport := self._transports.pop(group, None):
            transport.close()

    @metered("sync")
    def send_weights(
        self, bucket_bytes: int, group: str, adapters_only: bool, as_held: bool = False
    ) -> dict[str, float]:
        """Gather the weights; where this rank has a transport for ``group``, send all buckets and a checksum.

        Returns the bytes sent and the seconds it took. After an error this rank leaves the group, by which
        the others notice at once; they discard what they received.
        """
        which = {"adapters_only": adapters_only, "as_held": as_held}
        weights = self._trainer.weights.buckets(bucket_bytes, **which)
        specs = self._trainer.weights.specs(**which)
        try:
            with one_thread():
                return send(self._transports.get(group), weights, specs, bucket_bytes)
        except Exception:
            self.close_transfer(group)
            raise

    @metered("sync")
    def take_weights(self, bucket_bytes: int, senders: Collection[int], token: str) -> Taken | None:
        """Gather the weights; the ranks ``senders`` copy them as ``token`` and find what has changed."""
        weights = self._trainer.weights.buckets(bucket_bytes)
        if self._trainer.rank.index not in senders:
            for _ in weights:
                pass
            return None
        specs = self._trainer.weights.specs()
        with one_thread():
            changes = self._sent.take(weights, specs, bucket_bytes, self._trainer.device, token)
        return Taken(changes.base, {"sync/changed_share": changes.changed_share} | changes.seconds)

    @metered("sync")
    def send_taken(self, group: str, whole: bool) -> dict[str, float]:
        """Send the weights taken last, or what has changed in them; see `send_weights`. Ranks without a
        transport for ``group`` do nothing.
        """
        transport, taken = self._transports.get(group), self._sent
        if transport is None:
            return {}
        assert taken.held is not None and taken.changes is not None, "no weights were taken"
        try:
            with one_thread():
                if not whole:
                    return send_changes(transport, taken.changes, taken.held)
                held = taken.held
                return send(transport, held.weights(), held.specs, held.bucket_bytes)
        except Exception:
            self.close_transfer(group)
            raise

    @metered("snapshot")
    def snapshot(self, file: str, bucket_bytes: int, adapters_only: bool) -> list[ParameterSpec]:
        """Gather the weights; rank 0 copies them, and writes them to ``file`` while updates follow, until
        `is_saved`. Returns what is in the file.
        """
        weights = self._trainer.weights.buckets(bucket_bytes, adapters_only=adapters_only)
        specs = self.parameter_specs(adapters_only)
        first = self._trainer.rank.index == 0
        if first:
            self._snapshots.begin(Path(file))
        send(self._snapshots if first else None, weights, specs, bucket_bytes)
        return specs
