"""The copy of the weights that an engine's worker process holds, as functions of vLLM's worker.

whole     transport -> copy -> model           (bucket by bucket)
changes   transport -> copy, checksum -> model (what changed, with what vLLM fuses it with)
give      copy -> transport, in a thread       (to an engine that joins)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from actors.transfer.connections import Seat
from actors.transfer.stream import send
from actors.transfer.transport import open_transport
from grpo_dist.config import TransferBackend
from grpo_dist.policy.weight_deltas import HeldWeights


@dataclass(frozen=True, slots=True)
class HeldTransfer:
    """Which weights a transfer leads to, and how.

    Attributes:
        token: of the weights after it.
        base: of the weights whose changes are sent; None: whole weights are sent.
    """

    token: str
    base: str | None = None


class Giving:
    """Sends a copy in a thread of its own."""

    def __init__(self, copy: HeldWeights, backend: TransferBackend, seat: Seat, timeout_s: float) -> None:
        self._failed: BaseException | None = None
        arguments = copy, backend, seat, timeout_s
        self._thread = threading.Thread(target=self._run, args=arguments, name="give weights", daemon=True)
        self._thread.start()

    def _run(self, copy: HeldWeights, backend: TransferBackend, seat: Seat, timeout_s: float) -> None:
        try:
            transport = open_transport(backend, seat, timeout_s=timeout_s)
            try:
                send(transport, copy.weights(), copy.specs, copy.bucket_bytes)
            finally:
                transport.close()
        except BaseException as error:
            self._failed = error

    def is_done(self) -> bool:
        """Return whether all was sent. Raises the error of a transfer that failed."""
        if self._thread.is_alive():
            return False
        if self._failed is not None:
            raise self._failed
        return True


def held_token(worker: Any) -> str | None:
    """Return the token of the copy that ``worker`` holds, if any."""
    held = worker.weight_transfer_engine.held
    return None if held is None else held.token


def forget_loaded(worker: Any) -> None:
    """Note that the weights in the model of ``worker`` are lost."""
    worker.weight_transfer_engine.forget_loaded()


def start_giving(worker: Any, backend: TransferBackend, seat: Seat, timeout_s: float) -> None:
    """Start to send the copy that ``worker`` holds, if it is the first process of its engine."""
    engine = worker.weight_transfer_engine
    engine.giving = None
    if engine.parallel_config.rank:
        return
    assert engine.held is not None and engine.held.token is not None, "this engine holds no weights"
    engine.giving = Giving(engine.held, backend, seat, timeout_s)


def is_given(worker: Any) -> bool:
    """Return `Giving.is_done` of ``worker``; True for one that sends nothing."""
    giving = worker.weight_transfer_engine.giving
    return giving is None or bool(giving.is_done())
