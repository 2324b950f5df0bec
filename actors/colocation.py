"""Rollout engines and policy ranks on the same GPUs: which of them holds the memory, and when.

    sample           update                     push
    engines awake    engines asleep             weights awake, receive | cache awake
    policy on host   policy on the GPU ......................... sends | to host

Engines drop their weights while the policy trains, because the next push sends all of them. For a checkpoint,
which no push follows, they keep them in host memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from actors.workers.policy_group import PolicyGroup
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.health.bounds import Bound
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.types import TrainBatch
from grpo_dist.workers import ReferenceSyncHandle, WeightSyncHandle


class Colocation:
    """Moves the GPUs between engines and policy. The engines hold them first."""

    def __init__(
        self,
        policy: PolicyGroup,
        rollouts: RolloutPool,
        *,
        timeout_s: float,
        where_stuck: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """``timeout_s``: deadline of one switch; ``where_stuck``: see `Workers`."""
        self._policy, self._rollouts, self._timeout_s = policy, rollouts, timeout_s
        self._where_stuck = where_stuck
        self._training = False

    async def start(self) -> None:
        """Load both, one after the other, so that each finds the memory free that it measures or takes."""
        await self._rollouts.ready()
        await self._rollouts.sleep(keep_weights=True)
        await self._policy.ready()
        self._training = True

    async def to_training(self, *, keep_engine_weights: bool = False) -> None:
        if self._training:
            return
        async with self._deadline("the engines leave their GPUs to the policy"):
            await self._rollouts.sleep(keep_weights=keep_engine_weights)
            await self._policy.reload_states()
        self._training = True

    async def to_sampling(self, *, weights_are_awake: bool = False) -> None:
        async with self._deadline("the policy leaves its GPUs to the engines"):
            await self._policy.offload_states()
            await self._rollouts.wake_up(*(["kv_cache"] if weights_are_awake else []))
        self._training = False

    async def receive(self) -> None:
        """Put the policy and the engines' memory for weights on the GPU."""
        await self.to_training()
        async with self._deadline("the engines take memory for new weights"):
            await self._rollouts.wake_up("weights")

    def _deadline(self, what: str) -> AbstractAsyncContextManager[None]:
        return deadline(self._timeout_s, f"placement: {what}", explain=self._where_stuck)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Give the policy the GPUs for the length of the block, then give them back to the engines."""
        await self.to_training(keep_engine_weights=True)
        yield
        await self.to_sampling()


class ColocatedPolicy:
    """The policy, which takes the GPUs for each call that needs them."""

    def __init__(self, policy: PolicyGroup, colocation: Colocation) -> None:
        self._policy, self._colocation = policy, colocation

    def stage(self, batches: Sequence[TrainBatch], *, keep_logprobs: bool = False) -> Any:
        return self._policy.stage(batches, keep_logprobs=keep_logprobs)

    async def update(
        self, staged: Any, *, kl_coef: float | None = None, bounds: Sequence[Bound] = ()
    ) -> dict[str, float]:
        await self._colocation.to_training()
        return await self._policy.update(staged, kl_coef=kl_coef, bounds=bounds)

    async def trace_next(self, run_dir: Path, step: int) -> None:
        await self._policy.trace_next(run_dir, step)

    async def token_logprobs(self) -> dict[int, np.ndarray]:
        return await self._policy.token_logprobs()

    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]:
        """Take the GPUs, which the update that follows needs, too."""
        await self._colocation.to_training()
        return await self._policy.logprobs(batch)

    async def save(self, directory: Path, *, blocking: bool = True) -> None:
        async with self._colocation.training():
            await self._policy.save(directory, blocking=blocking)

    async def saved(self) -> None:
        await self._policy.saved()

    async def load(self, directory: Path) -> None:
        async with self._colocation.training():
            await self._policy.load(directory)

    async def export(self, directory: Path, *, tokenizer_dir: Path) -> None:
        async with self._colocation.training():
            await self._policy.export(directory, tokenizer_dir=tokenizer_dir)


class ColocatedSync:
    """The weight sync, which returns the GPUs to the engines."""

    def __init__(self, sync: WeightSyncHandle, colocation: Colocation) -> None:
        self._sync, self._colocation = sync, colocation

    async def push(self, version: int) -> dict[str, float]:
        await self._colocation.receive()
        metrics = await self._sync.push(version)
        await self._colocation.to_sampling(weights_are_awake=True)
        return metrics


class ColocatedReferenceSync:
    """The reference sync, during which the policy holds the GPUs."""

    def __init__(self, sync: ReferenceSyncHandle, colocation: Colocation) -> None:
        self._sync, self._colocation = sync, colocation

    async def refresh(self) -> None:
        async with self._colocation.training():
            await self._sync.refresh()
