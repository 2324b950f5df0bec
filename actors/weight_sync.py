"""Weight sync: from the policy's rank 0 to every engine, over vLLM's weight-transfer interface.

driver            policy ranks                           engines
  begin_update  ------------------------------------->   drain or freeze requests, drop the key-value cache
  both at once:   gather bucket, pack, broadcast  ===>   receive, add to checksum, load
                  broadcast checksum              ===>   compare; a difference ends the run
  finish_update ------------------------------------->   repack, take the version, serve again
"""

from __future__ import annotations

from actors.calls import result, results
from actors.policy import PolicyGroup
from actors.rollout import RolloutPool
from grpo_dist.concurrency import deadline, gather
from grpo_dist.config import WeightSync as SyncSettings
from grpo_dist.hardware import collective_backend
from grpo_dist.weight_buckets import ParameterSpec

GROUP = "rollout"


class WeightSync:
    """Driver-side handle. Made by `connect`; `push` moves the policy's weights to all engines."""

    def __init__(
        self,
        policy: PolicyGroup,
        rollouts: RolloutPool,
        specs: list[ParameterSpec],
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._policy, self._rollouts, self._specs = policy, rollouts, specs
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s

    @classmethod
    async def connect(
        cls, policy: PolicyGroup, rollouts: RolloutPool, settings: SyncSettings, *, timeout_s: float
    ) -> WeightSync:
        """Join rank 0 of the policy and all engine processes in one transfer group."""
        per_engine = rollouts.tensor_parallel_size
        bucket_bytes = settings.bucket_mb * 2**20
        world_size = 1 + per_engine * len(rollouts.workers)
        backend = collective_backend(settings.backend, policy.device, colocated=rollouts.colocated)
        async with deadline(timeout_s, "weight sync: policy and engines join the transfer group"):
            host, port = await policy.ranks[0].address.remote()
            common = {"host": host, "port": port, "world_size": world_size, "timeout_s": timeout_s}
            joining = [policy.ranks[0].open_transfer.remote(group=GROUP, backend=backend, **common)]
            for i, worker in enumerate(rollouts.workers):
                joining.append(
                    worker.open_transfer.remote(
                        rank_offset=1 + i * per_engine, bucket_bytes=bucket_bytes, **common
                    )
                )
            await results(joining)
            specs = await policy.ranks[0].parameter_specs.remote(policy.adapter_scale is not None)
        return cls(policy, rollouts, specs, bucket_bytes, timeout_s)

    async def push(self, version: int) -> dict[str, float]:
        """All engines hold the policy's weights as ``version`` when this returns.

        Raises TimeoutError naming the stage past the deadline, RuntimeError when an engine received other
        bytes than were sent or reports another version.
        """
        async with deadline(self._timeout_s, f"weight sync: engines stop for version {version}"):
            await results(worker.begin_update.remote() for worker in self._rollouts.workers)
        async with deadline(self._timeout_s, f"weight sync: version {version} travels"):
            scale = self._policy.adapter_scale
            receiving = [
                result(worker.receive_weights.remote(self._specs, scale)) for worker in self._rollouts.workers
            ]
            sending = self._policy.send_weights(
                self._bucket_bytes, group=GROUP, adapters_only=scale is not None
            )
            sent, *_ = await gather([sending, *receiving])
        async with deadline(self._timeout_s, f"weight sync: engines take version {version}"):
            reported = await results(
                worker.finish_update.remote(version) for worker in self._rollouts.workers
            )
        wrong = {f"rollout-{i}": r for i, r in enumerate(reported) if r != version}
        if wrong:
            raise RuntimeError(f"weight sync: engines should hold version {version} but report {wrong}")
        return {"sync/bytes": float(sent)}
