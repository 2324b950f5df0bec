"""What a rollout worker does to get weights, and to give its own to an engine that joins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray

from actors.transfer.connections import Seat
from actors.transfer.held_weights import HeldTransfer, forget_loaded, held_token, is_given, start_giving
from actors.transfer.transport import free_port
from actors.workers import drafter
from actors.workers.engine_settings import EngineSpec
from grpo_dist.config import TransferBackend
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.metering import Metered, metered

_GIVEN_POLL_S = 0.02


class WeightReceiver(Metered):
    """The part of a `RolloutWorker` that receives weights. Its methods run on the actor's event loop.

    A call goes on where the driver no longer waits for it, and the driver may begin the update again
    meanwhile: calls that change the state of an update run one after the other.
    """

    _spec: EngineSpec
    _engine: Any

    def __init__(self) -> None:
        super().__init__()
        self._updating = False  # between `begin_update` and `finish_update`
        self._received = False  # all weights of that update have arrived
        self._of: tuple[int, int] | None = None  # what they are; None: not known
        self._one_at_a_time = asyncio.Lock()

    async def address(self) -> tuple[str, int]:
        """Return an address at which this engine can listen: that of its node, and a free port."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    async def open_transfer(
        self, backend: TransferBackend, seats: Sequence[Seat], timeout_s: float, *, file: str | None = None
    ) -> None:
        """Have every process of the engine join a transfer group with its seat, and leave the group
        before. ``file``: read the next weights from this snapshot instead.
        """
        async with self._one_at_a_time:
            await self._end_old_update()
        info = {"backend": backend, "seats": list(seats), "timeout_s": timeout_s, "file": file}
        await self._engine.init_transfer(info)

    @metered("sync")
    async def begin_update(self, of: tuple[int, int] | None = None) -> bool:
        """Stop generating, and return whether this engine still lacks the weights.

        Args:
            of: which weights: their version, and the policy's updates before them. An update of others that
                was given up ends here. None: not known, the engine lacks them.

        In mode ``drain`` running requests finish first; in mode ``keep`` they continue under the new weights.
        Either way the key-value cache is dropped: a kept request recomputes it, so that no new token is
        conditioned on keys and values of old weights. An update that is repeated, because another engine was
        lost, may find all weights here.
        """
        async with self._one_at_a_time:
            await self._engine.pause(drain=self._spec.sync.mode == "drain")
            if self._spec.rollout.speculation.tokens:
                for name, tokens in (await self._engine.in_workers(drafter.take_counts))[0]._asdict().items():
                    self.meter.count(name, tokens)
            if of is None or of != self._of:
                await self._end_old_update()
            self._of = of
            if not self._updating:
                await self._engine.start_weight_update()
                self._updating = True
            return not self._received

    async def held_weights(self) -> str | None:
        """Return the token of the weights that all processes of the engine hold a copy of, if any."""
        tokens = set(await self._engine.in_workers(held_token))
        return tokens.pop() if len(tokens) == 1 else None

    @metered("sync")
    async def receive_weights(
        self,
        specs: Sequence[ParameterSpec],
        bucket_bytes: int,
        adapter_scale: float | None,
        held: HeldTransfer | None = None,
    ) -> bool:
        """Receive and load the weights.

        Args:
            adapter_scale: factor of low-rank adapters; None: whole weights.
            held: keep a copy of them, from which the next changes lead to the next weights; None: no copy.

        Returns:
            False: changes arrived, after which the copy is not the sender's; whole weights must follow.
        """
        parameters = [list(asdict(spec).values()) for spec in specs]
        info = {"parameters": parameters, "bucket_bytes": bucket_bytes, "adapter_scale": adapter_scale}
        async with self._one_at_a_time:
            self._updating = False  # a transfer that fails is started again
            await self._engine.update_weights(info | {"held": held})
            self._updating = True
            self._received = held is None or await self.held_weights() == held.token
            return self._received

    @metered("sync")
    async def finish_update(self, version: int) -> int:
        """Serve again under ``version``; return the version that the engine reports."""
        async with self._one_at_a_time:
            await self._engine.finish_weight_update()
            self._updating = self._received = False
            reported: int = await self._engine.set_weight_version(version)
            await self._engine.resume()
            return reported

    @metered("give_weights")
    async def give_weights(self, backend: TransferBackend, seat: Seat, timeout_s: float) -> None:
        """Send the copy of the weights that this engine holds, whole, to a group of which it is rank 0. The
        engine serves meanwhile; its copy must not change.
        """
        await self._engine.in_workers(lambda worker: start_giving(worker, backend, seat, timeout_s))
        while not all(await self._engine.in_workers(is_given)):  # bounded: by the deadline of the transport
            await asyncio.sleep(_GIVEN_POLL_S)

    async def forget_weights(self) -> None:
        """Note that the engine's weights are about to be dropped: the next changes load all of the copy."""
        await self._engine.in_workers(forget_loaded)

    async def _end_old_update(self) -> None:
        """End an update whose weights never got a version, because the policy was lost or the sync was given
        up; the next update sends all weights. The caller holds the lock.
        """
        if self._received:
            await self._engine.finish_weight_update()
            self._updating = self._received = False
