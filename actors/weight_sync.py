"""Weight sync: from the policy to every engine, over vLLM's weight-transfer interface.

driver            policy ranks                           engines
  begin_update  ------------------------------------->   drain or freeze requests, drop the key-value cache
  both at once:   gather bucket, pack, send       ===>   receive, add to checksum, load
                  send checksum                   ===>   compare; a difference ends the run
  finish_update ------------------------------------->   repack, take the version, serve again
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.calls import result, results
from actors.policy import PolicyGroup
from actors.rollout import RolloutPool
from actors.transfer_group import TransferGroup
from grpo_dist.concurrency import deadline
from grpo_dist.config import WeightSync as SyncSettings
from grpo_dist.metrics import Stopwatch


class WeightSync:
    """Driver-side handle. Made by `connect`; `push` moves the policy's weights to all engines."""

    def __init__(self, group: TransferGroup, rollouts: RolloutPool, timeout_s: float) -> None:
        self._group, self._rollouts, self._timeout_s = group, rollouts, timeout_s

    @classmethod
    async def connect(
        cls,
        policy: PolicyGroup,
        rollouts: RolloutPool,
        settings: SyncSettings,
        *,
        beside: Sequence[int] | None = None,
        timeout_s: float,
    ) -> WeightSync:
        """Join the policy and all engine processes in a transfer group. ``beside``: see `TransferGroup.open`.
        """
        async with deadline(timeout_s, "weight sync: policy and engines join the transfer group"):
            group = await TransferGroup.open(
                "rollout",
                policy,
                rollouts.workers,
                settings,
                processes_each=rollouts.tensor_parallel_size,
                adapters_only=policy.adapter_scale is not None,
                beside=beside,
                timeout_s=timeout_s,
            )
        return cls(group, rollouts, timeout_s)

    async def push(self, version: int) -> dict[str, float]:
        """All engines hold the policy's weights as ``version`` when this returns; metrics say what it took.

        Raises TimeoutError naming the stage past the deadline, RuntimeError when an engine received other
        bytes than were sent or reports another version.
        """
        workers, watch = self._rollouts.workers, Stopwatch()
        async with deadline(self._timeout_s, f"weight sync: engines stop for version {version}"):
            with watch("sync_stop"):
                await results(worker.begin_update.remote() for worker in workers)
        async with deadline(self._timeout_s, f"weight sync: version {version} travels"):
            with watch("sync_travel"):
                group = self._group
                arguments = group.specs, group.bucket_bytes, group.policy.adapter_scale
                receiving = [result(worker.receive_weights.remote(*arguments)) for worker in workers]
                sent = await group.send(receiving)
        async with deadline(self._timeout_s, f"weight sync: engines take version {version}"):
            with watch("sync_take"):
                reported = await results(worker.finish_update.remote(version) for worker in workers)
        wrong = {f"rollout-{i}": r for i, r in enumerate(reported) if r != version}
        if wrong:
            raise RuntimeError(f"weight sync: engines should hold version {version} but report {wrong}")
        return sent | watch.phases()
