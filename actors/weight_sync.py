"""Weight sync: from the policy to every engine, over vLLM's weight-transfer interface.

driver            policy ranks                           engines
  begin_update  ------------------------------------->   drain or freeze requests, drop the key-value cache
  both at once:   gather bucket, pack, send       ===>   receive, add to checksum, load
                  send checksum                   ===>   compare; a difference ends the run
  finish_update ------------------------------------->   repack, take the version, serve again

An engine that dies during the transfer ends it for all: it is repeated with the others, in a new group. The
replacement gets the weights in its own group, while the others keep serving. If only a connection is lost,
the transfer is repeated once.

With `weight_sync.deltas` (`DeltaSync`) the policy copies the weights while the engines stop:

    all engines hold the weights before   changes   -> engines compare the checksum of the whole
    one does not (new, restarted, late)   whole
    a checksum differs                    changes, then whole
    an engine joins                       whole, from the policy's copy
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from actors.lifecycle.calls import deadline_of, result, results
from actors.lifecycle.team import ElasticTeam
from actors.transfer.stream import HeldTransfer
from actors.transfer_group import TransferGroup, TransferSpec, added
from actors.workers.policy import Taken
from actors.workers.policy_group import PolicyGroup
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.config import WeightSyncConfig
from grpo_dist.errors import TransferLost, find_cause
from grpo_dist.policy.weight_buckets import bucket_size
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.metering import Stopwatch

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
    memory = await results(holder.__ray_call__.remote(_free_memory) for holder in holders)
    copies = [1, *[group.spec.processes_each] * len(group.workers)]
    needed: Counter[str] = Counter()
    for (node, _), count in zip(memory, copies, strict=True):
        needed[node] += count * size
    return all(needed[node] <= _OF_FREE_MEMORY * free for node, free in memory)


def _free_memory(_: Any) -> tuple[str, int]:
    """Return the node of an actor, and the free memory there, bytes."""
    return ray.get_runtime_context().get_node_id(), psutil.virtual_memory().available


class DeltaSync:
    """What `WeightSync` does with deltas.

    Attributes:
        token: of the weights that the policy took last; None: none yet.
    """

    def __init__(self) -> None:
        self.token: str | None = None
        self._of: tuple[int, int] | None = None  # version of what was taken, and updates before it
        self._taken: Taken | None = None

    async def take_during(
        self, stopping: Coroutine[Any, Any, list[bool]], group: TransferGroup, version: int
    ) -> list[bool]:
        """Have the policy copy its weights, which are ``version``, while engines are ``stopping``. A transfer
        that is repeated sends the same copy: where an engine is lost as it stops, too, since no engine holds
        a copy that was never sent, and the changes from it would be of no use to any.
        """
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
        tokens = await results(worker.held_weights.remote() for worker in receivers)
        base = self._taken.base if set(tokens) == {self._taken.base} else None
        sent, arrived = await self._offer(group, receivers, HeldTransfer(self.token, base))
        if not all(arrived):
            again, _ = await self._offer(group, receivers, HeldTransfer(self.token))
            sent = added(sent, again)
        counts = {"sync/whole": float(base is None), "sync/mismatches": float(arrived.count(False))}
        return added(sent, self._taken.metrics) | counts

    async def _offer(
        self, group: TransferGroup, receivers: Sequence[Any], what: HeldTransfer
    ) -> tuple[dict[str, float], list[bool]]:
        arguments = group.parameters, group.bucket_bytes, None, what
        receiving = [result(worker.receive_weights.remote(*arguments)) for worker in receivers]
        return await group.send_taken(receiving, whole=what.base is None)


class WeightSync:
    """Driver-side handle, made by `connect`: sends the policy's weights to all engines."""

    def __init__(
        self, group: TransferGroup, rollouts: RolloutPool, timeout_s: float, deltas: DeltaSync | None = None
    ) -> None:
        self._group, self._rollouts, self._timeout_s, self._deltas = group, rollouts, timeout_s, deltas
        self._opened = {group.name: group}  # those that are open, by name
        self._version, self._updates = 0, group.policy.updates  # of the last push
        self._one_at_a_time = asyncio.Lock()
        rollouts.team.catch_up = self.catch_up
        if isinstance(rollouts.team, ElasticTeam):
            rollouts.team.between_syncs = self._one_at_a_time

    @classmethod
    async def connect(
        cls,
        policy: PolicyGroup,
        rollouts: RolloutPool,
        settings: WeightSyncConfig,
        *,
        colocated_ranks: Sequence[int] | None = None,
        timeout_s: float,
    ) -> WeightSync:
        """Join the policy and all engine processes in a transfer group.

        ``colocated_ranks``: see `TransferGroup.open`.
        """
        all_of_them = policy.team.named() | rollouts.team.named()
        stage = "weight sync: policy and engines join the transfer group"
        adapters_only = policy.adapter_scale is not None
        spec = TransferSpec(settings, rollouts.tensor_parallel_size, adapters_only)
        async with deadline_of(all_of_them, timeout_s, stage):
            group = await TransferGroup.open(
                "rollout",
                policy,
                rollouts.team.alive(),
                spec,
                colocated_ranks=colocated_ranks,
                timeout_s=timeout_s,
            )
            uses = await uses_deltas(settings, group, colocated=colocated_ranks is not None)
        return cls(group, rollouts, timeout_s, DeltaSync() if uses else None)

    async def push(self, version: int) -> dict[str, float]:
        """Send the policy's weights to all serving engines as ``version``, and return metrics.

        Raises TimeoutError naming the stage that is late, RuntimeError when an engine received other bytes
        than were sent or reports another version.
        """
        team, watch = self._rollouts.team, Stopwatch()
        async with self._one_at_a_time:
            sent: dict[str, float] = {}
            repeated = False  # because a connection was lost, and no engine
            while True:
                team.check()
                workers = team.alive()
                try:
                    sent = await self._transfer(version, workers, watch) or sent
                    break
                except RayError as error:
                    self._opened.clear()
                    await self._group.policy.team.ask_all()
                    if await team.find_dead(workers):
                        continue
                    if repeated or not isinstance(find_cause(error), TransferLost):
                        raise
                    repeated = True
            self._version, self._updates = version, self._group.policy.updates
        return sent | watch.phases()

    async def catch_up(self, worker: Any) -> None:
        """Send the current weights to a restarted engine.

        The policy may have been updated since the last push, or be updating now. Then the weights carry a
        version that no other engine has yet.
        """
        policy, name = self._group.policy, "rollout restarted"
        engine = self._engines([worker])
        both = self._group.policy.team.named() | engine
        async with self._one_at_a_time:
            try:
                # The ranks may be in the middle of an update.
                seconds = self._timeout_s + policy.update_s
                stage = "weight sync: a restarted engine"
                async with deadline_of(both, seconds, f"{stage} joins"):
                    group = await self._group.reopen(
                        [worker], name=name, timeout_s=self._timeout_s, ranks_busy_s=policy.update_s
                    )
                async with deadline_of(both, seconds, f"{stage} receives"):
                    await worker.begin_update.remote()
                    await self._send(group, [worker])
                version = self._version
                if self._deltas is None or self._deltas.token is None:
                    version += policy.sent_after - self._updates
                async with deadline_of(both, seconds, f"{stage} takes version {version}"):
                    reported = await worker.finish_update.remote(version)
                    await group.close()
                self._opened.clear()  # the common group lacks this engine
            except RayTaskError:  # the policy may only have noticed that the engine is gone
                async with deadline_of(engine, self._timeout_s, f"{stage} answers its health check"):
                    await worker.health.remote()
                raise
        _check_versions([reported], version)

    async def _transfer(self, version: int, workers: list[Any], watch: Stopwatch) -> dict[str, float]:
        """Send ``version`` to the ``workers`` that lack it, and return metrics of the sender, {} if none
        lacks it. May be repeated.
        """
        engines = self._engines(workers)
        both = self._group.policy.team.named() | engines
        of = version, self._group.policy.updates
        stopping = results(worker.begin_update.remote(of) for worker in workers)
        who, stage = engines, f"weight sync: engines stop for version {version}"
        if self._deltas is not None:
            stopping, who = self._deltas.take_during(stopping, self._group, version), both
        async with deadline_of(who, self._timeout_s, stage):
            with watch("sync_stop"):
                lacks = await stopping
        sent: dict[str, float] = {}
        async with deadline_of(both, self._timeout_s, f"weight sync: version {version} travels"):
            with watch("sync_travel"):
                receivers = [worker for worker, lack in zip(workers, lacks, strict=True) if lack]
                for group in await self._open(receivers):
                    sent = added(sent, await self._send(group, group.workers))
        async with deadline_of(engines, self._timeout_s, f"weight sync: engines take version {version}"):
            with watch("sync_take"):
                reported = await results(worker.finish_update.remote(version) for worker in workers)
        _check_versions(reported, version)
        return sent

    def _engines(self, workers: Sequence[Any]) -> dict[str, Any]:
        """Return ``workers`` by name."""
        return {name: w for name, w in self._rollouts.team.named().items() if w in workers}

    async def _open(self, receivers: list[Any]) -> list[TransferGroup]:
        """Return open groups with ``receivers``: one, or two where some have GPUs of the policy and others
        their own.
        """
        first = self._group
        sharing = [worker for worker in receivers if worker in first.on_ranks]
        others = [worker for worker in receivers if worker not in first.on_ranks]
        wanted = {first.name: sharing, "rollout joined": others} if first.on_ranks else {first.name: others}
        groups = []
        for name, members in wanted.items():
            if members and (name not in self._opened or list(self._opened[name].workers) != members):
                self._opened[name] = await first.reopen(members, name=name, timeout_s=self._timeout_s)
            if members:
                groups.append(self._opened[name])
            elif (empty := self._opened.pop(name, None)) is not None:
                await empty.close()
        return groups

    async def _send(self, group: TransferGroup, receivers: Sequence[Any]) -> dict[str, float]:
        if self._deltas is not None and self._deltas.token is not None:
            return await self._deltas.send(group, receivers)
        arguments = group.parameters, group.bucket_bytes, group.policy.adapter_scale
        return await group.send([result(worker.receive_weights.remote(*arguments)) for worker in receivers])


def _check_versions(reported: Sequence[int], version: int) -> None:
    wrong = {f"rollout-{i}": r for i, r in enumerate(reported) if r != version}
    if wrong:
        raise RuntimeError(f"weight sync: engines should hold version {version} but report {wrong}")
