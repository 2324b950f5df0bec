"""Policy to reference: the frozen model is renewed every so many steps, or follows as a moving average."""

from __future__ import annotations

from actors.calls import result, results
from actors.policy import PolicyGroup
from actors.reference import ReferencePool
from grpo_dist.concurrency import deadline, gather
from grpo_dist.config import WeightSync as SyncSettings
from grpo_dist.hardware import collective_backend
from grpo_dist.weight_buckets import ParameterSpec

GROUP = "reference"


class ReferenceSync:
    """Driver-side handle. Made by `connect`; `refresh` mixes the policy's weights into every reference."""

    def __init__(
        self,
        policy: PolicyGroup,
        reference: ReferencePool,
        specs: list[ParameterSpec],
        bucket_bytes: int,
        mix: float,
        timeout_s: float,
    ) -> None:
        self._policy, self._reference, self._specs = policy, reference, specs
        self._bucket_bytes, self._mix, self._timeout_s = bucket_bytes, mix, timeout_s

    @classmethod
    async def connect(
        cls,
        policy: PolicyGroup,
        reference: ReferencePool,
        settings: SyncSettings,
        *,
        mix: float,
        timeout_s: float,
    ) -> ReferenceSync:
        """Join rank 0 of the policy and all reference workers in a transfer group of their own."""
        async with deadline(timeout_s, "reference: policy and reference workers join the transfer group"):
            host, port = await policy.ranks[0].address.remote()
            common = {
                "backend": collective_backend(settings.backend, policy.device),
                "host": host,
                "port": port,
                "world_size": 1 + len(reference.workers),
                "timeout_s": timeout_s,
            }
            joining = [policy.ranks[0].open_transfer.remote(group=GROUP, **common)]
            joining += [w.open_transfer.remote(rank=i, **common) for i, w in enumerate(reference.workers, 1)]
            await results(joining)
            specs = await policy.ranks[0].parameter_specs.remote()
        return cls(policy, reference, specs, settings.bucket_mb * 2**20, mix, timeout_s)

    async def refresh(self) -> None:
        """Every reference worker holds (1 - mix) of its own weights and mix of the policy's when this
        returns.
        """
        async with deadline(self._timeout_s, "reference: the policy's weights travel"):
            receiving = [
                result(w.mix_in.remote(self._specs, self._bucket_bytes, self._mix))
                for w in self._reference.workers
            ]
            await gather([self._policy.send_weights(self._bucket_bytes, group=GROUP), *receiving])
