"""Sync weights from the policy to every engine over vLLM's weight-transfer interface.

driver            policy ranks                           engines
  begin_update  ------------------------------------->   drain or freeze requests, drop the key-value cache
  both at once:   gather bucket, pack, send       ===>   receive, add to checksum, load
                  send checksum                   ===>   compare; a difference ends the run
  finish_update ------------------------------------->   repack, take the version, serve again

If an engine dies during the transfer, the transfer is repeated with the others in a new group. Its
replacement gets the weights in a separate group while the others keep serving. If only a connection is lost,
the transfer is repeated once.

With `weight_sync.deltas` (`DeltaSync`) the policy copies the weights while the engines stop:

    all engines have the previous weights changes   -> engines compare the checksum of the whole
    one does not (new, restarted, late)   whole
    a checksum differs                    changes, then whole
    an engine joins                       whole, from the policy's copy

In a `TransferGroup` the policy sends its weights to other workers: engines, or a reference that is refreshed
every few steps or follows as a moving average (`ReferenceSync`). Rank 0 sends to all workers. If colocated,
each rank sends to the process on its GPU, with one group per GPU.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from actors.lifecycle.calls import PARALLEL, are_on_one_host, deadline_of, result, results
from actors.lifecycle.team import ElasticTeam
from actors.transfer.connections import Seat, new_secret
from actors.transfer.stream import HeldTransfer
from actors.workers.policy import PolicyGroup, Taken
from actors.workers.reference import ReferencePool
from actors.workers.rollout import RolloutPool
from grpo_dist.config import WeightSyncConfig
from grpo_dist.errors import TransferLost, find_cause
from grpo_dist.policy.weight_buckets import ParameterSpec, bucket_size
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.hardware import transfer_backend
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.types import Prompt, Rollout, Sampling

# Bucket size, MiB. vLLM walks the whole model for each bucket: on a CPU, a sync of 538 MB took a fifth longer
# with 4 MiB.
_BUCKET_MB = {"cpu": 32, "cuda": 256}

# Backends whose mapped memory does not leave its device: every rank sends to the process on the same device.
_MAPPED = ("ipc", "shared_memory")


async def _make_seats(policy: PolicyGroup, senders: Sequence[int]) -> tuple[dict[int, Seat], list[Seat]]:
    """Return the senders' seats, by policy rank, and the receivers' seats: receiver i joins the group in
    which policy rank ``senders[i]`` is rank 0.
    """
    sender_seats, receiver_seats = {}, []
    for rank, count in Counter(senders).items():
        host, port = await policy.ranks[rank].address.remote()
        sender_seats[rank] = Seat(host, port, 0, 1 + count, new_secret())
    next_rank: Counter[int] = Counter()
    for rank in senders:
        next_rank[rank] += 1
        receiver_seats.append(replace(sender_seats[rank], rank=next_rank[rank]))
    return sender_seats, receiver_seats


@dataclass(frozen=True)
class TransferSpec:
    """What a transfer group sends, and to how many processes.

    Attributes:
        settings: backend and bucket size.
        processes_each: receiving processes per worker.
        adapters_only, as_held: see `FullWeights.buckets`.
    """

    settings: WeightSyncConfig
    processes_each: int = 1
    adapters_only: bool = False
    as_held: bool = False


@dataclass(frozen=True)
class TransferGroup:
    """Driver-side handle, made by `open`: sends ``parameters`` in buckets of ``bucket_bytes``.

    Attributes:
        senders: the policy ranks that send.
        one_host: whether all members are on one machine.
        on_ranks: for each colocated worker, the policy rank on the GPU of each of its processes.
    """

    policy: PolicyGroup
    name: str
    workers: tuple[Any, ...]
    spec: TransferSpec
    parameters: list[ParameterSpec]
    bucket_bytes: int
    senders: tuple[int, ...]
    one_host: bool
    on_ranks: Mapping[Any, Sequence[int]] = field(default_factory=dict)

    async def reopen(
        self, workers: Sequence[Any], *, name: str, timeout_s: float, ranks_busy_s: float = 0.0
    ) -> TransferGroup:
        """Open a group of the same policy with ``workers``: either workers in ``on_ranks``, or workers that
        do not share its devices.
        """
        ranks, spec = [rank for worker in workers for rank in self.on_ranks.get(worker, ())], self.spec
        if spec.settings.backend in _MAPPED and not ranks:  # the backend was set for the initial engines
            reaches = await are_on_one_host([self.policy.ranks[0], *workers])
            if spec.settings.backend == "ipc" or not reaches:
                spec = replace(spec, settings=spec.settings.model_copy(update={"backend": "auto"}))
        return await TransferGroup.open(
            name,
            self.policy,
            workers,
            spec,
            colocated_ranks=ranks or None,
            timeout_s=timeout_s,
            ranks_busy_s=ranks_busy_s,
        )

    def close(self) -> None:
        """Close the policy's side, without waiting for it: the ranks may be in an update."""
        for rank in self.policy.ranks:
            rank.close_transfer.remote(self.name)

    @classmethod
    async def open(
        cls,
        name: str,
        policy: PolicyGroup,
        workers: Sequence[Any],
        spec: TransferSpec,
        *,
        colocated_ranks: Sequence[int] | None = None,
        timeout_s: float,
        ranks_busy_s: float = 0.0,
    ) -> TransferGroup:
        """Connect the policy's ranks and all processes of ``workers``; the caller sets the deadline.

        Args:
            colocated_ranks: the policy rank on the GPU of each receiving process; None: not colocated.
            ranks_busy_s: the ranks may join this much later than the workers, which wait for them. Other
                waits take at most ``timeout_s``, so that a lost worker does not block the ranks.
        """
        settings, each = spec.settings, spec.processes_each
        one_host = await are_on_one_host([policy.ranks[0], *workers])
        backend = transfer_backend(
            settings.backend,
            policy.device,
            one_host=one_host,
            colocated=colocated_ranks is not None,
        )
        senders = [0] * (each * len(workers))
        if colocated_ranks is not None and backend in _MAPPED:
            senders = list(colocated_ranks)
        sender_seats, receiver_seats = await _make_seats(policy, senders)
        joining = [
            policy.ranks[rank].open_transfer.remote(name, backend, seat, timeout_s)
            for rank, seat in sender_seats.items()
        ]
        for i, worker in enumerate(workers):
            seats = receiver_seats[i * each : (i + 1) * each]
            joining.append(worker.open_transfer.remote(backend, seats, timeout_s + ranks_busy_s))
        try:
            await results(joining)
        except BaseException:  # the ranks would wait for a lost worker, and the next group for the ranks
            for rank, seat in sender_seats.items():
                policy.ranks[rank].stop_joining.options(concurrency_group=PARALLEL).remote(seat.port)
            raise
        bucket_bytes = (settings.bucket_mb or _BUCKET_MB[policy.device]) * 2**20
        parameters = await policy.ranks[0].parameter_specs.remote(spec.adapters_only, spec.as_held)
        sending = tuple(sorted(set(senders)))
        ranks = colocated_ranks or ()
        on_ranks = {worker: ranks[i * each : (i + 1) * each] for i, worker in enumerate(workers) if ranks}
        return cls(policy, name, tuple(workers), spec, parameters, bucket_bytes, sending, one_host, on_ranks)

    async def send(self, receiving: Iterable[Coroutine[Any, Any, Any]]) -> dict[str, float]:
        """Send the weights while the workers are ``receiving``; return the sender's metrics. The caller sets
        the deadline.
        """
        spec = self.spec
        sending = self.policy.send_weights(
            self.bucket_bytes, group=self.name, adapters_only=spec.adapters_only, as_held=spec.as_held
        )
        return (await gather([sending, *receiving]))[0]

    async def take(self, token: str) -> Taken:
        """Make the senders copy the weights as ``token``. The caller sets the deadline."""
        return await self.policy.take_weights(self.bucket_bytes, self.senders, token)

    async def send_taken(
        self, receiving: Iterable[Coroutine[Any, Any, bool]], *, whole: bool
    ) -> tuple[dict[str, float], list[bool]]:
        """Send the copied weights, or only their changes, while the workers are ``receiving``.

        Returns the sender's metrics and the workers' results. The caller sets the deadline.
        """
        sent, *arrived = await gather([self.policy.send_taken(group=self.name, whole=whole), *receiving])
        return sent, arrived


def added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """Add the metrics of two transfers."""
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in [*a, *(n for n in b if n not in a)]}


class ReferenceSync:
    """Driver-side handle, made by `connect`: mixes the policy's weights into every reference."""

    def __init__(self, group: TransferGroup, reference: ReferencePool, mix: float, timeout_s: float) -> None:
        self._group, self._reference, self._mix, self._timeout_s = group, reference, mix, timeout_s

    @classmethod
    async def connect(
        cls,
        policy: PolicyGroup,
        reference: ReferencePool,
        settings: WeightSyncConfig,
        *,
        mix: float,
        colocated_ranks: Sequence[int] | None = None,
        timeout_s: float,
    ) -> ReferenceSync:
        """Connect the policy and all reference workers in a separate transfer group.

        ``colocated_ranks``: see `TransferGroup.open`.
        """
        both = policy.team.named() | reference.team.named()
        stage = "reference: policy and reference workers join the transfer group"
        async with deadline_of(both, timeout_s, stage):
            group = await TransferGroup.open(
                "reference",
                policy,
                reference.workers,
                TransferSpec(settings, as_held=True),
                colocated_ranks=colocated_ranks,
                timeout_s=timeout_s,
            )
        return cls(group, reference, mix, timeout_s)

    async def refresh(self) -> None:
        """Set every reference worker's weights to (1 - mix) * reference + mix * policy.

        Raises StateLost when a reference worker or a policy rank is lost.
        """
        both = self._group.policy.team.named() | self._reference.team.named()
        try:
            async with deadline_of(both, self._timeout_s, "reference: the policy's weights travel"):
                arguments = self._group.parameters, self._group.bucket_bytes, self._mix
                await self._group.send(result(w.mix_in.remote(*arguments)) for w in self._reference.workers)
        except RayError:
            await gather([self._group.policy.team.ask_all(), self._reference.team.ask_all()])
            raise


_OF_FREE_MEMORY = 0.25  # maximum share of a host's free memory for copies, with `auto`


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
    """Return an actor's node, and its free memory in bytes."""
    return ray.get_runtime_context().get_node_id(), psutil.virtual_memory().available


class DeltaSync:
    """The delta transfers of `WeightSync`.

    Attributes:
        token: identifies the policy's last copy of its weights; None: none yet.
    """

    def __init__(self) -> None:
        self.token: str | None = None
        self._copied: tuple[int, int] | None = None  # version and update count of the copied weights
        self._taken: Taken | None = None

    async def take_during(
        self, stopping: Coroutine[Any, Any, list[bool]], group: TransferGroup, version: int
    ) -> list[bool]:
        """Make the policy copy its weights, of ``version``, while engines are ``stopping``. A repeated
        transfer sends the same copy, even if an engine is lost while stopping: no engine holds a copy that
        was never sent, so changes relative to it would be useless.
        """
        if self._copied == (key := (version, group.policy.updates)):
            return await stopping
        self.token = self._copied = None
        taking = asyncio.create_task(self._take(group, key), name="the policy copies its weights")
        try:
            stopped, _ = await gather([stopping, result(asyncio.shield(taking))])
        except RayError:
            await taking
            raise
        finally:
            taking.cancel()
        lacks: list[bool] = stopped
        return lacks

    async def _take(self, group: TransferGroup, key: tuple[int, int]) -> None:
        token = secrets.token_hex(8)
        self._taken = await group.take(token)
        self.token, self._copied = token, key

    async def send(self, group: TransferGroup, receivers: Sequence[Any]) -> dict[str, float]:
        """Send changes if all ``receivers`` hold the previous weights, else whole weights; return metrics."""
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
        self._opened = {group.name: group}  # open groups by name
        self._version, self._updates = 0, group.policy.updates  # at the last push
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
        """Connect the policy and all engine processes in a transfer group.

        ``colocated_ranks``: see `TransferGroup.open`.
        """
        actors = policy.team.named() | rollouts.team.named()
        stage = "weight sync: policy and engines join the transfer group"
        adapters_only = policy.adapter_scale is not None
        spec = TransferSpec(settings, rollouts.tensor_parallel_size, adapters_only)
        async with deadline_of(actors, timeout_s, stage):
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
        """Send the policy's weights to all serving engines as ``version``; return metrics.

        Raises TimeoutError naming the late stage, and RuntimeError if an engine received other bytes than
        were sent or reports another version.
        """
        team, watch = self._rollouts.team, Stopwatch()
        async with self._one_at_a_time:
            sent: dict[str, float] = {}
            repeated = False  # after the loss of a connection, but of no engine
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

        The policy may have been updated since the last push, or be updating now. Then the weights get a
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
                group.close()
                async with deadline_of(engine, self._timeout_s, f"{stage} takes version {version}"):
                    reported = await worker.finish_update.remote(version)
                self._opened.clear()  # the common group lacks this engine
            except RayTaskError:  # the policy's error may only mean that the engine is gone
                async with deadline_of(engine, self._timeout_s, f"{stage} answers its health check"):
                    await worker.health.remote()
                raise
        _check_versions(dict.fromkeys(engine, reported), version)

    async def _transfer(self, version: int, workers: list[Any], watch: Stopwatch) -> dict[str, float]:
        """Send ``version`` to the ``workers`` that lack it; return the sender's metrics, or {} if none lacks
        it. May be repeated.
        """
        engines = self._engines(workers)
        both = self._group.policy.team.named() | engines
        key = version, self._group.policy.updates
        stopping = results(worker.begin_update.remote(key) for worker in workers)
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
        _check_versions(dict(zip(engines, reported, strict=True)), version)
        return sent

    def _engines(self, workers: Sequence[Any]) -> dict[str, Any]:
        """Return ``workers`` by name, in order."""
        return {name: w for name, w in self._rollouts.team.named().items() if w in workers}

    async def _open(self, receivers: list[Any]) -> list[TransferGroup]:
        """Return open groups with ``receivers``: two if some are colocated with the policy and others not."""
        first = self._group
        sharing = [worker for worker in receivers if worker in first.on_ranks]
        others = [worker for worker in receivers if worker not in first.on_ranks]
        by_name = {first.name: sharing, "rollout joined": others} if first.on_ranks else {first.name: others}
        groups = []
        for name, members in by_name.items():
            if members and (name not in self._opened or list(self._opened[name].workers) != members):
                self._opened[name] = await first.reopen(members, name=name, timeout_s=self._timeout_s)
            if members:
                groups.append(self._opened[name])
            elif (unused := self._opened.pop(name, None)) is not None:
                unused.close()
        return groups

    async def _send(self, group: TransferGroup, receivers: Sequence[Any]) -> dict[str, float]:
        if self._deltas is not None and self._deltas.token is not None:
            return await self._deltas.send(group, receivers)
        arguments = group.parameters, group.bucket_bytes, group.policy.adapter_scale
        return await group.send([result(worker.receive_weights.remote(*arguments)) for worker in receivers])


def _check_versions(reported: Mapping[str, int], version: int) -> None:
    wrong = {name: r for name, r in reported.items() if r != version}
    if wrong:
        raise RuntimeError(f"weight sync: engines should hold version {version} but report {wrong}")


class EngineProbe:
    """Interface of `grpo_dist.loop.sync_probe`: sample on one engine at a time, and get the policy's
    log-probs of the samples.
    """

    def __init__(self, policy: PolicyGroup, rollouts: RolloutPool) -> None:
        self._rollouts, self.logprobs = rollouts, policy.logprobs

    def engines(self) -> dict[str, Any]:
        """Return the serving engines by name; a replacement is another object. Raises the role's failure."""
        team = self._rollouts.team
        team.check()
        serve = team.alive()
        return {name: engine for name, engine in team.named().items() if engine in serve}

    async def sample(
        self, engine: Any, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> list[tuple[Rollout, ...]]:
        """Sample one completion per seed for each of ``prompts`` on ``engine``; return [] if it is lost.

        The caller sets the deadline.
        """
        try:
            async with self._rollouts.turn():
                return await results(engine.probe.remote(prompt, list(seeds), sampling) for prompt in prompts)
        except RayError:
            if not await self._rollouts.team.find_dead([engine]):
                raise
            return []
