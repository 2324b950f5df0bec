"""Batches on their way: launched in order, each group scored and given its reference log-probs as soon as it
is sampled.

Staleness is bounded by admission: the driver says through which batch it may launch, and no finished group is
ever thrown away for being late, which would favour short answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import numpy as np

from grpo_dist.concurrency import deadline, gather
from grpo_dist.config import Config
from grpo_dist.data.order import step_prompts
from grpo_dist.seeds import request_seed
from grpo_dist.types import Group, Prompt, Sampling
from grpo_dist.workers import RolloutsRef, Workers


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group ready to train on; ``ref_logprobs`` float32 [C] per sample, empty when no reference is
    needed.
    """

    group: Group
    ref_logprobs: list[np.ndarray]


class Pipeline:
    """Launched batches, oldest first. ``finished`` holds groups of later batches restored from a
    checkpoint.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        prompts: list[Prompt],
        *,
        first: int,
        finished: dict[int, list[Group]],
    ) -> None:
        self._config, self._workers, self._prompts = config, workers, prompts
        self._next_batch = first
        self._restored = dict(finished)
        self._launched: deque[tuple[int, asyncio.Task[list[ScoredGroup]]]] = deque()

    def launch(self, *, through: int) -> None:
        """Start sampling every batch up to and with ``through`` that is not launched yet."""
        while self._next_batch <= through:
            batch = self._next_batch
            self._launched.append((batch, asyncio.create_task(self._batch(batch), name=f"batch {batch}")))
            self._next_batch += 1

    async def next(self) -> list[ScoredGroup]:
        """The oldest launched batch, in prompt order, once every group of it is finished."""
        batch, task = self._launched.popleft()
        return await self._wait(batch, task)

    async def settle(self) -> None:
        """Before weights change: in mode ``drain`` nothing may be in flight, so every version is of one
        piece.
        """
        if self._config.weight_sync.mode == "drain":
            for batch, task in self._launched:
                await self._wait(batch, task)

    def finished_ahead(self) -> dict[int, list[Group]]:
        """Groups of launched batches that are complete: what a checkpoint keeps. The others are launched
        again.
        """
        return {
            batch: [scored.group for scored in task.result()]
            for batch, task in self._launched
            if task.done() and not task.cancelled() and task.exception() is None
        }

    async def _wait(self, batch: int, task: asyncio.Task[list[ScoredGroup]]) -> list[ScoredGroup]:
        async with deadline(
            self._config.cluster.timeouts.sample_s, f"sample: batch {batch} sampled and scored"
        ):
            return await task

    async def _batch(self, batch: int) -> list[ScoredGroup]:
        if batch in self._restored:
            return await gather(self._with_reference(g) for g in self._restored.pop(batch))
        indices = step_prompts(
            len(self._prompts), self._config.batch.prompts_per_step, self._config.seed, batch
        )
        return await gather(self._group(self._prompts[i], batch) for i in indices)

    async def _group(self, prompt: Prompt, batch: int) -> ScoredGroup:
        config = self._config
        seeds = [
            request_seed(config.seed, batch, prompt.uid, i) for i in range(config.batch.samples_per_prompt)
        ]
        sampling = Sampling(
            temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens
        )
        rollouts = await self._workers.rollouts.sample(prompt, seeds=seeds, sampling=sampling)
        group, ref_logprobs = await gather(
            [self._workers.rewards.score(prompt, rollouts), self._reference(prompt, rollouts)]
        )
        return ScoredGroup(group, ref_logprobs)

    async def _with_reference(self, group: Group) -> ScoredGroup:
        return ScoredGroup(group, await self._reference(group.prompt, group.rollouts))

    async def _reference(self, prompt: Prompt, rollouts: RolloutsRef) -> list[np.ndarray]:
        if self._workers.reference is None:
            return []
        return await self._workers.reference.logprobs(prompt, rollouts)
