"""Engines that evaluate while training continues.

policy ranks        | copy of version k | update k+1 ... | update k+2 ...
disk                |        snapshot of version k
evaluation engines  |                     load | sample the held-out problems under version k

Training never waits for these engines, and weight syncs skip them. A replacement engine loads the same
snapshot and resamples the lost groups with the same seeds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from actors.lifecycle.calls import deadline_of, result
from actors.workers.policy import PolicyGroup
from actors.workers.reward import RewardPool
from actors.workers.rollout import RolloutPool
from grpo_dist.policy.snapshots import Snapshot, discard, read_snapshot
from grpo_dist.runtime.concurrency import gather, run_in_thread
from grpo_dist.runtime.files import flush

_BUCKET_BYTES = 64 * 2**20


class EvaluationEngines:
    """Driver-side handle. An evaluation uses its ``rollouts`` and ``rewards``."""

    def __init__(
        self, policy: PolicyGroup, rollouts: RolloutPool, rewards: RewardPool, *, timeout_s: float
    ) -> None:
        """``timeout_s``: deadline of loading a snapshot."""
        self._policy, self.rollouts, self.rewards, self._timeout_s = policy, rollouts, rewards, timeout_s
        self._unwritten: Snapshot | None = None
        self._snapshot: Snapshot | None = None
        self._writing, self._loading = asyncio.Lock(), asyncio.Lock()
        rollouts.team.catch_up = self._catch_up

    async def snapshot(self, directory: Path, version: int) -> None:
        """Copy the policy's weights, of ``version``, to be written to ``directory``; updates may follow."""
        self._unwritten = await self._policy.snapshot(directory, version, _BUCKET_BYTES)

    async def written(self) -> None:
        """Wait until the last snapshot is on disk, so that it survives the machine."""
        async with self._writing:
            if (snapshot := self._unwritten) is not None:
                await self._policy.saved()
                await run_in_thread(lambda: _finish(snapshot))
                self._unwritten = None

    async def load(self, directory: Path) -> bool:
        """Load the snapshot in ``directory`` on all engines; return False if it is incomplete.

        Raises RuntimeError if an engine reads other bytes than the policy wrote or reports another version,
        and ValueError for a damaged description.
        """
        snapshot = await run_in_thread(lambda: read_snapshot(directory))
        if snapshot is None:
            return False
        async with self._loading:
            self._snapshot, team = snapshot, self.rollouts.team
            team.check()
            await gather(self._load(worker, snapshot) for worker in team.alive())
        return True

    def has_snapshot(self, directory: Path) -> bool:
        """Return whether ``directory`` has a complete snapshot."""
        return read_snapshot(directory) is not None

    async def discard(self, directory: Path) -> None:
        """Delete the snapshot in ``directory``. A replacement engine then waits for the next one."""
        async with self._loading:
            if self._snapshot is not None and self._snapshot.file.parent == directory:
                self._snapshot = None
        await run_in_thread(lambda: discard(directory))

    async def _load(self, worker: Any, snapshot: Snapshot) -> None:
        """Load ``snapshot``. If the engine is lost, its replacement loads it."""
        try:
            await self._load_on(worker, snapshot)
        except RayError:
            if not await self.rollouts.team.find_dead([worker]):
                raise

    async def _load_on(self, worker: Any, snapshot: Snapshot) -> None:
        names = {name: w for name, w in self.rollouts.team.named().items() if w is worker}
        stage = f"evaluation: version {snapshot.version} is loaded"
        async with deadline_of(names, self._timeout_s, stage):
            await worker.abandon.remote()  # drops requests of a cancelled evaluation
            await worker.open_transfer.remote("gloo", (), self._timeout_s, file=str(snapshot.file))
            await worker.begin_update.remote()
            received = snapshot.parameters, snapshot.bucket_bytes, snapshot.adapter_scale
            await worker.receive_weights.remote(*received)
            reported = await result(worker.finish_update.remote(snapshot.version))
        if reported != snapshot.version:
            raise RuntimeError(
                f"evaluation: engines should hold version {snapshot.version} but report {reported}"
            )

    async def _catch_up(self, worker: Any) -> None:
        async with self._loading:
            if self._snapshot is not None:
                await self._load_on(worker, self._snapshot)


def _finish(snapshot: Snapshot) -> None:
    flush(snapshot.file)
    snapshot.describe()
