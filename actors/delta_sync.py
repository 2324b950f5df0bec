"""Weight deltas, driver's side: who gets changes, who gets whole weights, and from whom.

all engines hold the weights before   changes   -> engines compare the checksum of the whole
one does not (new, restarted, late)   whole
a checksum differs                    changes, then whole
an engine joins                       whole, from another engine's copy; from the policy's if there is none
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from actors.lifecycle.calls import on_one_host, result, results
from actors.lifecycle.watchdog import deadline_of
from actors.transfer.connections import Seat
from actors.transfer.handshake import new_secret
from actors.transfer.held_weights import HeldTransfer
from actors.transfer_group import TransferGroup, added
from actors.workers.rollout_pool import RolloutPool
from actors.workers.weight_sender import Taken
from grpo_dist.config import WeightSyncConfig
from grpo_dist.policy.weight_buckets import bucket_size
from grpo_dist.runtime.concurrency import gather

_OF_FREE_MEMORY = 0.25  # most that copies may take on a host, for `auto`


async def uses_deltas(settings: WeightSyncConfig, group: TransferGroup, *, colocated: bool) -> bool:
    """Return whether the policy sends changes; see `WeightSyncConfig.deltas`."""
    if settings.deltas != "auto":
        return settings.deltas
    if colocated or group.one_host or group.spec.adapters_only:
        return False
    size = bucket_size(group.parameters)
    if any(spec.torch_dtype.itemsize > 2 for spec in group.parameters):
        return False
    holders = [group.policy.ranks[0], *group.workers]
    found = await results(holder.__ray_call__.remote(_free_memory) for holder in holders)
    copies = [1, *[group.spec.processes_each] * len(group.workers)]
    needed: Counter[str] = Counter()
    for (node, _), own in zip(found, copies, strict=True):
        needed[node] += own * size
    return all(needed[node] <= _OF_FREE_MEMORY * free for node, free in found)


def _free_memory(_: Any) -> tuple[str, int]:
    """Return the node of an actor, and the free memory there, bytes."""
    return ray.get_runtime_context().get_node_id(), psutil.virtual_memory().available


class DeltaSync:
    """What `WeightSync` does with deltas.

    Attributes:
        token: of the weights that the policy took last; None: none yet.
    """

    def __init__(self, rollouts: RolloutPool, timeout_s: float) -> None:
        self._rollouts, self._timeout_s = rollouts, timeout_s
        self.token: str | None = None
        self._of: tuple[int, int] | None = None  # version of what was taken, and updates before it
        self._taken: Taken | None = None
        self._given = 0  # how often an engine was asked to give its weights to another
        self._group: TransferGroup | None = None

    async def take_during(
        self, stopping: Coroutine[Any, Any, list[bool]], group: TransferGroup, version: int
    ) -> list[bool]:
        """Have the policy copy its weights, which are ``version``, while engines are ``stopping``. A transfer
        that is repeated sends the same copy: where an engine is lost as it stops, too, since no engine holds
        a copy that was never sent, and the changes from it would be of no use to any.
        """
        self._group = group
        if self._of == (of := (version, group.policy.updates)):
            return await stopping
        self.token = self._of = None
        taking = asyncio.create_task(self._take(group, of), name="the policy copies its weights")
        try:
            stopped, _ = await gather([stopping, result(asyncio.shield(taking))])
        except RayError:
            await taking
            raise
        finally:
            taking.cancel()
        lacks: list[bool] = stopped
        return lacks

    async def _take(self, group: TransferGroup, of: tuple[int, int]) -> None:
        token = secrets.token_hex(8)
        self._taken = await group.take(token)
        self.token, self._of = token, of

    async def send(self, group: TransferGroup, receivers: Sequence[Any]) -> dict[str, float]:
        """Send changes to ``receivers`` if all hold the weights before, else whole weights.

        Returns metrics.
        """
        assert self.token is not None and self._taken is not None
        held = await results(worker.held_weights.remote() for worker in receivers)
        base = self._taken.base if set(held) == {self._taken.base} else None
        sent, arrived = await self._offer(group, receivers, HeldTransfer(self.token, base))
        if not all(arrived):
            again, _ = await self._offer(group, receivers, HeldTransfer(self.token))
            sent = added(sent, again)
        counts = {"sync/whole": float(base is None), "sync/mismatches": float(arrived.count(False))}
        return added(sent, self._taken.metrics) | counts

    async def from_peer(self, worker: Any, version: int) -> bool:
        """Have ``worker``, which joins, get the weights ``version`` from an engine that holds them. Return
        False if none could give them. The engines take turns, since giving takes cores and network of theirs.
        """
        team, group = self._rollouts.team, self._group
        if self.token is None or self._of is None or self._of[0] != version or group is None:
            return False
        peers = [peer for peer in team.alive() if peer is not worker]
        first, self._given = self._given % max(1, len(peers)), self._given + 1
        for peer in peers[first:] + peers[:first]:
            names = {name: w for name, w in team.named().items() if w in (worker, peer)}
            stage = "weight sync: an engine gets the weights from another"
            try:
                async with deadline_of(names, self._timeout_s, stage):
                    if await peer.held_weights.remote() == self.token:
                        await self._give(peer, worker, group, version)
                        return True
            except (RayError, TimeoutError):  # the peer may be lost; a lost ``worker`` ends it here
                async with deadline_of(names, self._timeout_s, f"{stage}: it answers its health check"):
                    await worker.health.remote()
        return False

    async def _give(self, peer: Any, worker: Any, group: TransferGroup, version: int) -> None:
        """Both ends have the weights in host memory, so that no GPU takes part."""
        each = group.spec.processes_each
        backend = "shared_memory" if await on_one_host([peer, worker]) else "gloo"
        host, port = await peer.address.remote()
        seat = Seat(host, port, 0, 1 + each, new_secret())
        seats = [replace(seat, rank=1 + i) for i in range(each)]

        async def join() -> int:
            await worker.open_transfer.remote(backend, seats, self._timeout_s)
            await worker.begin_update.remote()
            assert self.token is not None
            await worker.receive_weights.remote(
                group.parameters, group.bucket_bytes, None, HeldTransfer(self.token)
            )
            reported: int = await worker.finish_update.remote(version)
            return reported

        _, reported = await gather([result(peer.give_weights.remote(backend, seat, self._timeout_s)), join()])
        if reported != version:
            raise RuntimeError(f"weight sync: an engine should hold version {version} but reports {reported}")

    async def _offer(
        self, group: TransferGroup, receivers: Sequence[Any], what: HeldTransfer
    ) -> tuple[dict[str, float], list[bool]]:
        arguments = group.parameters, group.bucket_bytes, None, what
        receiving = [result(worker.receive_weights.remote(*arguments)) for worker in receivers]
        return await group.send_taken(receiving, whole=what.base is None)
