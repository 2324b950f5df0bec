"""Engines on which evaluation runs while training continues.

policy ranks        | copy of version k | update k+1 ... | update k+2 ...
disk                |        snapshot of version k
evaluation engines  |                     load | sample the held-out problems under version k

Nothing of training waits for these engines, and no weight sync includes them. An engine that replaces a lost
one loads the same snapshot, and samples the lost groups again with the same seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from actors.lifecycle.calls import deadline_of, result
from actors.workers.policy_group import PolicyGroup
from actors.workers.reward import RewardPool
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.policy.snapshots import Snapshot, discard, read_snapshot
from grpo_dist.runtime.concurrency import gather, run_in_thread
from grpo_dist.runtime.files import flush

_BUCKET_BYTES = 64 * 2**20


class EvaluationEngines:
    """Driver-side handle. ``rollouts`` and ``rewards`` are what an evaluation needs."""

    def __init__(
        self, policy: PolicyGroup, rollouts: RolloutPool, rewards: RewardPool, *, timeout_s: float
    ) -> None:
        """``timeout_s``: deadline of loading a snapshot."""
        self._policy, self.rollouts, self.rewards, self._timeout_s = policy, rollouts, rewards, timeout_s
        self._unwritten: Snapshot | None = None
        self._snapshot: Snapshot | None = None
        self._writing, self._loading = asyncio.Lock(), asyncio.Lock()
        self.version: int | None = None
        self._is_loaded = asyncio.Event()
        rollouts.team.catch_up = self._catch_up

    async def snapshot(self, directory: Path, version: int) -> None:
        """Copy the policy's weights, which are ``version``, for the file in ``directory``. Updates may follow
        at once.
        """
        self._unwritten = await self._policy.snapshot(directory, version, _BUCKET_BYTES)
        self.version = version
        self._is_loaded.clear()

    async def written(self) -> None:
        """Wait until the last snapshot is on disk, so that it survives the machine."""
        async with self._writing:
            if (snapshot := self._unwritten) is not None:
                with self._ends_the_wait_if_it_fails():
                    await self._policy.saved()
                    await run_in_thread(lambda: _finish(snapshot))
                self._unwritten = None

    async def load(self, directory: Path) -> bool:
        """Have all engines load the snapshot in ``directory``; False where it is not whole.

        Raises RuntimeError where an engine read other bytes than the policy wrote, or reports another
        version, and ValueError for a damaged description.
        """
        snapshot = await run_in_thread(lambda: read_snapshot(directory))
        if snapshot is None:
            self._is_loaded.set()  # the loop learns of it from the evaluation
            return False
        async with self._loading:
            self._snapshot, self.version = snapshot, snapshot.version
            team = self.rollouts.team
            with self._ends_the_wait_if_it_fails():
                team.check()
                await gather(self._load(worker, snapshot) for worker in team.alive())
        self._is_loaded.set()
        return True

    async def loaded(self) -> None:
        """Wait until the engines hold ``version``, or cannot be given it. The caller holds the deadline."""
        await self._is_loaded.wait()  # bounded: the caller has a deadline

    @contextmanager
    def _ends_the_wait_if_it_fails(self) -> Iterator[None]:
        """End the wait of `loaded` where the block raises: the loop learns of it from the evaluation."""
        try:
            yield
        except BaseException:
            self._is_loaded.set()
            raise

    def has_snapshot(self, directory: Path) -> bool:
        """Return whether there is a whole snapshot in ``directory``."""
        return read_snapshot(directory) is not None

    async def discard(self, directory: Path) -> None:
        """Delete the snapshot in ``directory``. An engine that replaces a lost one then loads none: it gets
        the next.
        """
        async with self._loading:
            if self._snapshot is not None and self._snapshot.file.parent == directory:
                self._snapshot = None
        await run_in_thread(lambda: discard(directory))

    async def _load(self, worker: Any, snapshot: Snapshot) -> None:
        """Load ``snapshot``. A lost engine is left to its replacement, which loads it, too."""
        try:
            await self._load_on(worker, snapshot)
        except RayError:
            if not await self.rollouts.team.find_dead([worker]):
                raise

    async def _load_on(self, worker: Any, snapshot: Snapshot) -> None:
        names = {name: w for name, w in self.rollouts.team.named().items() if w is worker}
        stage = f"evaluation: version {snapshot.version} is loaded"
        async with deadline_of(names, self._timeout_s, stage):
            await worker.abandon.remote()  # requests of an evaluation that was given up
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


def serving(engines: EvaluationEngines | None, version: int) -> Sequence[tuple[str, Any]]:
    """Return the serving engines by name if they hold ``version``, or are about to."""
    if engines is None or engines.version != version:
        return ()
    team = engines.rollouts.team
    team.check()
    alive = team.alive()
    return [(name, engine) for name, engine in team.named().items() if engine in alive]
