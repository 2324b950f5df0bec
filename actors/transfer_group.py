"""Rank 0 of the policy and some workers in a group of their own, through which it sends them its weights."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.calls import on_one_host, results
from actors.policy import PolicyGroup
from grpo_dist.concurrency import gather
from grpo_dist.config import WeightSync as SyncSettings
from grpo_dist.hardware import transfer_backend
from grpo_dist.weight_buckets import ParameterSpec

# Weights gathered and sent at once, MiB. Without GPUs few, which then stay in the processor's cache between
# the one who packs and the one who loads.
_BUCKET_MB = {"cpu": 4, "cuda": 256}


@dataclass(frozen=True)
class TransferGroup:
    """Driver-side handle. Made by `open`; what is sent is ``specs`` in buckets of ``bucket_bytes``."""

    policy: PolicyGroup
    name: str
    specs: list[ParameterSpec]
    bucket_bytes: int
    adapters_only: bool

    @classmethod
    async def open(
        cls,
        name: str,
        policy: PolicyGroup,
        workers: Sequence[Any],
        settings: SyncSettings,
        *,
        processes_each: int = 1,
        adapters_only: bool = False,
        colocated: bool = False,
        timeout_s: float,
    ) -> TransferGroup:
        """All join. ``processes_each``: of a worker, that receive. ``colocated``: on the policy's own GPUs.
        The caller holds the deadline.
        """
        first = policy.ranks[0]
        one_host = await on_one_host([first, *workers])
        host, port = await first.address.remote()
        backend = transfer_backend(
            settings.backend, policy.device, one_host=one_host, colocated=colocated
        )
        common = {
            "backend": backend,
            "host": host,
            "port": port,
            "world_size": 1 + processes_each * len(workers),
            "timeout_s": timeout_s,
        }
        joining = [first.open_transfer.remote(group=name, **common)]
        for i, worker in enumerate(workers):
            joining.append(worker.open_transfer.remote(rank=1 + i * processes_each, **common))
        await results(joining)
        bucket_bytes = (settings.bucket_mb or _BUCKET_MB[policy.device]) * 2**20
        specs = await first.parameter_specs.remote(adapters_only)
        return cls(policy, name, specs, bucket_bytes, adapters_only)

    async def send(self, receiving: Iterable[Coroutine[Any, Any, Any]]) -> dict[str, float]:
        """The weights, while the workers are ``receiving``; returns metrics of the sender. The caller holds
        the deadline.
        """
        sending = self.policy.send_weights(
            self.bucket_bytes, group=self.name, adapters_only=self.adapters_only
        )
        return (await gather([sending, *receiving]))[0]
