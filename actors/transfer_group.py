"""Groups in which the policy sends its weights to other workers: engines (`weight_sync`), or a reference that
is refreshed every few steps or follows as a moving average (`ReferenceSync`).

Rank 0 sends to all workers. Where policy and workers share GPUs, each rank sends to the process on its GPU,
and there are as many groups as GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayError

from actors.lifecycle.calls import are_on_one_host, deadline_of, result, results
from actors.transfer.connections import Seat, new_secret
from actors.workers.policy import Taken
from actors.workers.policy_group import PolicyGroup
from actors.workers.reference import ReferencePool
from grpo_dist.config import WeightSyncConfig
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.hardware import transfer_backend

# Size of a bucket, MiB. vLLM walks the whole model once a bucket: on a CPU a sync of 538 MB took a fifth
# longer with 4 MiB.
_BUCKET_MB = {"cpu": 32, "cuda": 256}

# Mapped memory does not leave its device: every rank sends to the process on its own device.
_MAPPED = ("ipc", "shared_memory")


@dataclass(frozen=True)
class _Seats:
    of_senders: dict[int, Seat]  # by policy rank
    of_receivers: list[Seat]


async def _seats(policy: PolicyGroup, senders: Sequence[int]) -> _Seats:
    """Return the seats of all processes: receiver i joins the group in which policy rank ``senders[i]`` is
    rank 0.
    """
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
class TransferSpec:
    """What a transfer group sends, and to how many processes.

    Attributes:
        settings: backend and bucket size.
        processes_each: receiving processes of each worker.
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
        one_host: all members are on one machine.
        on_ranks: of workers on the policy's GPUs, the rank on the GPU of each of their processes.
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
        """Open a group of the same policy with ``workers``: either some of ``on_ranks``, or others, which do
        not share its devices.
        """
        ranks, spec = [rank for worker in workers for rank in self.on_ranks.get(worker, ())], self.spec
        if spec.settings.backend in _MAPPED and not ranks:  # it was set for the engines of the start
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

    async def close(self) -> None:
        """Close the policy's side; the caller holds the deadline."""
        await results(rank.close_transfer.remote(self.name) for rank in self.policy.ranks)

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
        """Join the policy's ranks and all processes of ``workers``; the caller holds the deadline.

        Args:
            colocated_ranks: for each receiving process the policy rank on its GPU; None: GPUs of their own.
            ranks_busy_s: the ranks may join this much later than the workers, which wait for them. No other
                wait exceeds ``timeout_s``, so that a lost worker does not keep the ranks from their work.
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
        seats = await _seats(policy, senders)
        joining = [
            policy.ranks[rank].open_transfer.remote(name, backend, seat, timeout_s)
            for rank, seat in seats.of_senders.items()
        ]
        for i, worker in enumerate(workers):
            taken = seats.of_receivers[i * each : (i + 1) * each]
            joining.append(worker.open_transfer.remote(backend, taken, timeout_s + ranks_busy_s))
        await results(joining)
        bucket_bytes = (settings.bucket_mb or _BUCKET_MB[policy.device]) * 2**20
        parameters = await policy.ranks[0].parameter_specs.remote(spec.adapters_only, spec.as_held)
        sending = tuple(sorted(set(senders)))
        ranks = colocated_ranks or ()
        on_ranks = {worker: ranks[i * each : (i + 1) * each] for i, worker in enumerate(workers) if ranks}
        return cls(policy, name, tuple(workers), spec, parameters, bucket_bytes, sending, one_host, on_ranks)

    async def send(self, receiving: Iterable[Coroutine[Any, Any, Any]]) -> dict[str, float]:
        """Send the weights while the workers are ``receiving``, and return metrics of the sender. The caller
        holds the deadline.
        """
        spec = self.spec
        sending = self.policy.send_weights(
            self.bucket_bytes, group=self.name, adapters_only=spec.adapters_only, as_held=spec.as_held
        )
        return (await gather([sending, *receiving]))[0]

    async def take(self, token: str) -> Taken:
        """Have the senders copy the weights as ``token``. The caller holds the deadline."""
        return await self.policy.take_weights(self.bucket_bytes, self.senders, token)

    async def send_taken(
        self, receiving: Iterable[Coroutine[Any, Any, bool]], *, whole: bool
    ) -> tuple[dict[str, float], list[bool]]:
        """Send what was taken, or what has changed in it, while the workers are ``receiving``.

        Returns metrics of the sender, and what the workers return. The caller holds the deadline.
        """
        sent, *arrived = await gather([self.policy.send_taken(group=self.name, whole=whole), *receiving])
        return sent, arrived


def added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of metrics of two transfers."""
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
        """Join the policy and all reference workers in a transfer group of their own.

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
        """Replace every reference worker's weights by (1 - mix) of its own and mix of the policy's.

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
