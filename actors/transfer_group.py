"""The policy and some workers in groups of their own, through which it sends them its weights.

Rank 0 sends to all of them, or, where policy and workers share GPUs, each rank to who is on its GPU: then
there are as many groups as GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.lifecycle.calls import on_one_host, results
from actors.transfer.connections import Seat
from actors.transfer.handshake import new_secret
from actors.workers.policy import PolicyGroup
from grpo_dist.config import WeightSyncConfig
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.hardware import transfer_backend

# Weights gathered and sent at once, MiB. Without GPUs few, which then stay in the processor's cache between
# the one who packs and the one who loads.
_BUCKET_MB = {"cpu": 4, "cuda": 256}

# Memory that is mapped does not leave its device: there every rank sends to the process beside it.
_MAPPED = ("ipc", "shared_memory")


@dataclass(frozen=True)
class _Seats:
    of_senders: dict[int, Seat]  # by policy rank
    of_receivers: list[Seat]


async def _seats(policy: PolicyGroup, senders: Sequence[int]) -> _Seats:
    """Of every process: receiver i is in the group of policy rank ``senders[i]``, who is rank 0 there."""
    of_senders, of_receivers = {}, []
    for rank, count in Counter(senders).items():
        host, port = await policy.ranks[rank].address.remote()
        of_senders[rank] = Seat(host, port, 0, 1 + count, new_secret())
    next_rank: Counter[int] = Counter()
    for rank in senders:
        next_rank[rank] += 1
        of_receivers.append(replace(of_senders[rank], rank=next_rank[rank]))
    return _Seats(of_senders, of_receivers)


@dataclass(frozen=True)
class TransferGroup:
    """Driver-side handle. Made by `open`; what is sent is ``specs`` in buckets of ``bucket_bytes``.
    ``adapters_only``, ``as_held``: see `Trainer.iter_weights`.
    """

    policy: PolicyGroup
    name: str
    specs: list[ParameterSpec]
    bucket_bytes: int
    adapters_only: bool
    workers: tuple[Any, ...]
    settings: WeightSyncConfig
    processes_each: int
    as_held: bool = False

    async def again(
        self, workers: Sequence[Any], *, name: str, timeout_s: float, ranks_busy_s: float = 0.0
    ) -> TransferGroup:
        """One of the same policy with other ``workers``, which do not share its devices."""
        return await TransferGroup.open(
            name,
            self.policy,
            workers,
            self.settings,
            processes_each=self.processes_each,
            adapters_only=self.adapters_only,
            as_held=self.as_held,
            timeout_s=timeout_s,
            ranks_busy_s=ranks_busy_s,
        )

    async def close(self) -> None:
        """The policy's side; the caller holds the deadline."""
        await results(rank.close_transfer.remote(self.name) for rank in self.policy.ranks)

    @classmethod
    async def open(
        cls,
        name: str,
        policy: PolicyGroup,
        workers: Sequence[Any],
        settings: WeightSyncConfig,
        *,
        processes_each: int = 1,
        adapters_only: bool = False,
        as_held: bool = False,
        beside: Sequence[int] | None = None,
        timeout_s: float,
        ranks_busy_s: float = 0.0,
    ) -> TransferGroup:
        """All join. ``processes_each``: of a worker, that receive. ``beside``: for each of these processes
        the policy rank on its GPU; None: they have devices of their own. ``ranks_busy_s``: ranks may come so
        much later than the workers, which wait for them; nobody else waits longer than ``timeout_s``, so that
        a worker that is lost meanwhile does not keep the ranks from their work. The caller holds the
        deadline.
        """
        backend = transfer_backend(
            settings.backend,
            policy.device,
            one_host=await on_one_host([policy.ranks[0], *workers]),
            colocated=beside is not None,
        )
        senders = [0] * (processes_each * len(workers))
        if beside is not None and backend in _MAPPED:
            senders = list(beside)
        seats = await _seats(policy, senders)
        joining = [
            policy.ranks[rank].open_transfer.remote(name, backend, seat, timeout_s)
            for rank, seat in seats.of_senders.items()
        ]
        for i, worker in enumerate(workers):
            taken = seats.of_receivers[i * processes_each : (i + 1) * processes_each]
            joining.append(worker.open_transfer.remote(backend, taken, timeout_s + ranks_busy_s))
        await results(joining)
        bucket_bytes = (settings.bucket_mb or _BUCKET_MB[policy.device]) * 2**20
        specs = await policy.ranks[0].parameter_specs.remote(adapters_only, as_held)
        members = tuple(workers)
        return cls(
            policy, name, specs, bucket_bytes, adapters_only, members, settings, processes_each, as_held
        )

    async def send(self, receiving: Iterable[Coroutine[Any, Any, Any]]) -> dict[str, float]:
        """The weights, while the workers are ``receiving``; returns metrics of the sender. The caller holds
        the deadline.
        """
        sending = self.policy.send_weights(
            self.bucket_bytes, group=self.name, adapters_only=self.adapters_only, as_held=self.as_held
        )
        return (await gather([sending, *receiving]))[0]
