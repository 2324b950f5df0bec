"""The workers of supervised training: the policy's ranks alone."""

from __future__ import annotations

from pathlib import Path

from actors.cluster import QUEUEING, Cluster
from actors.lifecycle.usage import ActorUsage
from actors.placement.notice import leaving_nodes
from grpo_dist.workers import NO_SAMPLING, Workers


class SupervisedCluster(Cluster):
    """Starts and ends the ranks of a `SupervisedConfig`. After a loss all of them start again."""

    async def _start_training(self, model_dir: Path) -> Workers:
        await self._reserve(training=True)
        await self._build_kernels()
        policy = self._create_policy(model_dir)
        await self._ready(None)
        limit_s = self._config.cluster.timeouts.sync_s
        usage = ActorUsage({"policy": [policy.team]}, queueing=QUEUEING, timeout_s=limit_s)
        leaving = await leaving_nodes(policy.team, limit_s)
        return Workers(
            NO_SAMPLING, NO_SAMPLING, None, policy, NO_SAMPLING, usage=usage, where_stuck=self.where_stuck,
            leaving_nodes=leaving,
        )  # fmt: skip
