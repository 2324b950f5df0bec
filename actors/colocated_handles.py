"""Handles of roles that take turns: each call waits for its turn, see `Colocation`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actors.colocation import POLICY, Colocation
from actors.evaluation_engines import EvaluationEngines
from actors.sync_probe import EngineProbe
from actors.workers.policy_group import PolicyGroup
from grpo_dist.health.bounds import Bound
from grpo_dist.policy.snapshots import Snapshot
from grpo_dist.types import EpochUpdate, Prompt, TeacherLogprobs, TrainBatch
from grpo_dist.workers import ReferenceSyncHandle, Workers


def colocated(workers: Workers, colocation: Colocation, *, has_reference: bool) -> Workers:
    """Return ``workers``, connected, as handles that take turns. ``has_reference``: the loss needs one, which
    the policy is itself where ``workers`` have none.
    """
    colocation.sync, policy = workers.sync, colocation.policy
    own, reference, sync = ColocatedPolicy(policy, colocation), workers.reference, workers.reference_sync
    evaluation = workers.evaluation
    assert evaluation is None or isinstance(evaluation, EvaluationEngines), "the workers of `Cluster`"
    if evaluation is not None:
        evaluation.take_turns(own)
    return replace(
        workers,
        policy=own,
        probe=EngineProbe(own, colocation.rollouts, evaluation),
        evaluation=evaluation,
        sync=colocation,  # its push returns the GPUs to the engines
        reference=BaseReference(policy, colocation) if has_reference and reference is None else reference,
        reference_sync=ColocatedReferenceSync(sync, colocation) if sync else None,
    )


class ColocatedPolicy:
    """The policy, which takes the GPUs for each call that needs them."""

    def __init__(self, policy: PolicyGroup, colocation: Colocation) -> None:
        self._policy, self._colocation = policy, colocation
        self._turn = partial(colocation.turn, POLICY)

    def stage(
        self,
        batches: Sequence[TrainBatch],
        *,
        keep_logprobs: bool = False,
        later_epochs: Sequence[Sequence[EpochUpdate]] = (),
    ) -> Any:
        return self._policy.stage(batches, keep_logprobs=keep_logprobs, later_epochs=later_epochs)

    async def update(
        self, staged: Any, *, kl_coef: float | None = None, bounds: Sequence[Bound] = ()
    ) -> dict[str, float]:
        async with self._turn():
            self._colocation.moved()
            return await self._policy.update(staged, kl_coef=kl_coef, bounds=bounds)

    async def trace_next(self, run_dir: Path, step: int) -> None:
        await self._policy.trace_next(run_dir, step)

    async def token_logprobs(self) -> dict[int, np.ndarray]:
        return await self._policy.token_logprobs()

    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]:
        async with self._turn():
            return await self._policy.logprobs(batch)

    async def score_norms(self, batch: TrainBatch) -> dict[int, np.ndarray]:
        async with self._turn():
            return await self._policy.score_norms(batch)

    async def snapshot(self, directory: Path, version: int, bucket_bytes: int) -> Snapshot:
        async with self._turn():
            return await self._policy.snapshot(directory, version, bucket_bytes)

    async def save(self, directory: Path, *, blocking: bool = True) -> None:
        async with self._turn():
            await self._policy.save(directory, blocking=blocking)

    async def saved(self) -> None:
        await self._policy.saved()

    async def load(self, directory: Path) -> None:
        async with self._turn():
            self._colocation.moved()
            await self._policy.load(directory)

    async def export(self, directory: Path, *, tokenizer_dir: Path) -> None:
        async with self._turn():
            await self._policy.export(directory, tokenizer_dir=tokenizer_dir)


class ColocatedReferenceSync:
    """The reference sync, for which policy and reference hold the GPUs together."""

    def __init__(self, sync: ReferenceSyncHandle, colocation: Colocation) -> None:
        self._sync, self._colocation = sync, colocation

    async def refresh(self) -> None:
        await self._colocation.refresh(self._sync.refresh)


_Asked = tuple[Prompt, Any, int, "asyncio.Future[list[Any]]"]  # prompt, samples, top_k, answer


class BaseReference:
    """The reference of a policy of adapters: the policy without them.

    The calls for all groups of a batch wait for the policy's turn, and are answered together: those that want
    as many likeliest tokens.
    """

    def __init__(self, policy: PolicyGroup, colocation: Colocation) -> None:
        self._policy, self._turn = policy, partial(colocation.turn, POLICY)
        self._waiting: list[_Asked] = []
        self._answering: asyncio.Task[None] | None = None

    async def logprobs(self, prompt: Prompt, rollouts: Any) -> list[np.ndarray]:
        """Return log-probs of the samples. ``rollouts``: the samples, or an object reference to them."""
        return await self._asked(prompt, rollouts, 0)

    async def top_logprobs(self, prompt: Prompt, rollouts: Any, top_k: int) -> list[TeacherLogprobs]:
        """Return them with the ``top_k`` likeliest tokens; ``rollouts`` as for `logprobs`."""
        return await self._asked(prompt, rollouts, top_k)

    async def _asked(self, prompt: Prompt, rollouts: Any, top_k: int) -> list[Any]:
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, rollouts, top_k, answer))
        try:
            async with self._turn():
                taken = [waiting for waiting in self._waiting if not waiting[-1].done()]
                self._waiting = []
                if taken:  # as a task: it is for the others, too, should this caller be cancelled
                    self._answering = asyncio.create_task(self._answer(taken), name="log-probs of the base")
                return await answer  # bounded: the call of the ranks has a deadline
        finally:
            answer.cancel()  # of a caller that was cancelled: it is not asked for any more

    async def _answer(self, taken: list[_Asked]) -> None:
        for top_k in sorted({asked[2] for asked in taken}):
            await self._answer_alike([asked for asked in taken if asked[2] == top_k], top_k)

    async def _answer_alike(self, taken: list[_Asked], top_k: int) -> None:
        policy, groups = self._policy, [(prompt, samples) for prompt, samples, *_ in taken]
        call = policy.base_top_logprobs(groups, top_k) if top_k else policy.base_logprobs(groups)
        try:
            found: list[Any] = await call
        except Exception as error:
            for *_, answer in taken:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (*_, answer), values in zip(taken, found, strict=True):
            if not answer.done():  # its caller may have been cancelled
                answer.set_result(values)

    async def save(self, path: Path) -> None:
        """Nothing: it never changes, and is in the model's directory."""

    async def load(self, path: Path) -> None:
        """Nothing, see `save`."""
