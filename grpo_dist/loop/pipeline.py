"""Batches on their way: launched in order, each group scored and given its reference log-probs as soon as it
is sampled.

Staleness is bounded by admission: the driver says through which batch it may launch, and no finished group is
ever thrown away for being late, which would favour short answers.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import numpy as np

from grpo_dist.algorithms.moments import Moments
from grpo_dist.config import Config
from grpo_dist.data.curriculum import Curriculum
from grpo_dist.data.order import EpochOrder, OrderState, PromptOrder
from grpo_dist.data.stream import PromptStream
from grpo_dist.health.state import HealthState
from grpo_dist.loop.progress import Progress, SampledBatch
from grpo_dist.runtime.concurrency import deadline, finished_unless, gather, sampled_again
from grpo_dist.runtime.seeds import request_seed
from grpo_dist.types import Group, Prompt, Sampling, has_signal
from grpo_dist.workers import RolloutsRef, Workers


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group ready to train on; ``ref_logprobs`` float32 [C] per sample, empty when no reference is
    needed.
    """

    group: Group
    ref_logprobs: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The groups that one step trains on, and those that dynamic sampling put aside."""

    scored: list[ScoredGroup]
    discarded: list[Group] = field(default_factory=list)

    @property
    def sampled(self) -> SampledBatch:
        return SampledBatch([s.group for s in self.scored], self.discarded)


class Pipeline:
    """Launched batches, oldest first; a context manager. ``progress`` is what a checkpoint kept of them."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        prompts: list[Prompt],
        *,
        first: int,
        progress: Progress,
    ) -> None:
        self._config, self._workers, self._prompts = config, workers, prompts
        self._next_batch = first
        self._restored = dict(progress.ahead)
        # Of batches that are not trained on yet: groups that are sampled and scored, by uid.
        self._finished = {
            batch: {group.prompt.uid: group for group in groups} for batch, groups in progress.begun.items()
        }
        self._taken = dict(progress.taken)
        self._order = order_of(config, prompts, progress.order)
        self._launched: deque[tuple[int, asyncio.Task[ScoredBatch]]] = deque()

    def launch(self, *, through: int) -> None:
        """Start sampling every batch up to and with ``through`` that is not launched yet."""
        while self._next_batch <= through:
            batch = self._next_batch
            if batch not in self._taken:
                self._taken[batch] = self._order.take(batch)
            self._launched.append((batch, asyncio.create_task(self._batch(batch), name=f"batch {batch}")))
            self._next_batch += 1

    @property
    def oldest(self) -> asyncio.Task[ScoredBatch] | None:
        """The launched batch that `next` waits for; None: nothing is launched."""
        return self._launched[0][1] if self._launched else None

    async def next(self, *, unless: Callable[[], bool] = lambda: False) -> ScoredBatch | None:
        """The oldest launched batch, in prompt order, once every group of it is finished; None as soon as
        ``unless`` is true while it is not.
        """
        batch, task = self._launched[0]
        async with self._deadline(batch):
            if not await finished_unless(task, unless):
                return None
        self._launched.popleft()
        done = task.result()  # bounded: it is done
        self._order.trained(self._taken.pop(batch), done.sampled.sampled)
        self._restored.pop(batch, None)
        self._finished.pop(batch, None)
        return done

    async def settle(self, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """Before weights change: in mode ``drain`` nothing may be in flight, so every version is of one
        piece. False as soon as ``unless`` is true while something is.
        """
        if self._config.weight_sync.mode == "drain":
            for batch, task in self._launched:
                async with self._deadline(batch):
                    if not await finished_unless(task, unless):
                        return False
                    task.result()  # bounded: it is done
        return True

    async def renew_reference(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """``refresh`` changes the reference. Launched batches finish first, because their calls are in front
        of it, and then get the log-probs of the one they will be trained with.
        """
        finished = [await self._wait(batch, task) for batch, task in self._launched]
        await refresh()
        for i, done in enumerate(finished):
            batch = self._launched[i][0]
            renewed = asyncio.create_task(self._referenced(done.sampled), name=f"batch {batch}")
            await self._wait(batch, renewed)
            self._launched[i] = (batch, renewed)

    def progress(
        self, *, kl_coef: float, health: HealthState, unassessed: bool, rewards: Moments | None = None
    ) -> Progress:
        """What a checkpoint keeps: finished groups of launched batches (the others are launched again, on the
        same prompts), and what decides which prompts come next.
        """
        ahead = dict(self._restored) | {
            batch: task.result().sampled  # bounded: it is done
            for batch, task in self._launched
            if task.done() and not task.cancelled() and task.exception() is None
        }
        begun = {
            batch: list(self._finished[batch].values())
            for batch, _ in self._launched
            if batch not in ahead and self._finished.get(batch)
        }
        return Progress(
            ahead,
            kl_coef,
            dict(self._taken),
            self._order.state,
            health,
            begun,
            unassessed,
            rewards or Moments(),
        )

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """What is launched is not waited for, whyever the run has ended."""
        tasks = [task for _, task in self._launched]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, batch: int, task: asyncio.Task[ScoredBatch]) -> ScoredBatch:
        async with self._deadline(batch):
            return await task

    def _deadline(self, batch: int) -> AbstractAsyncContextManager[None]:
        limit_s, stage = self._config.cluster.timeouts.sample_s, f"sample: batch {batch} sampled and scored"
        return deadline(limit_s, stage, explain=self._workers.where_stuck)

    async def _batch(self, batch: int) -> ScoredBatch:
        if batch in self._restored:
            return await self._referenced(self._restored[batch])
        prompts = [self._prompts[self._order.prompt(place)] for place in self._taken[batch]]
        if self._config.dynamic_sampling.enabled:
            return await self._referenced(await self._groups_with_signal(prompts, batch))
        return ScoredBatch(await gather(self._scored(prompt, batch) for prompt in prompts))

    async def _referenced(self, batch: SampledBatch) -> ScoredBatch:
        return ScoredBatch(await gather(self._with_reference(g) for g in batch.groups), batch.discarded)

    async def _groups_with_signal(self, prompts: list[Prompt], batch: int) -> SampledBatch:
        """As many groups as a step has, those with a signal first, and what else was sampled. ``prompts``:
        those of the step, and then those that are asked for as they are needed; where there are no more,
        groups without a signal fill the batch up.
        """
        settings, wanted = self._config.dynamic_sampling, self._config.batch.prompts_per_step
        own, further = prompts[:wanted], prompts[wanted:]
        useful: list[Group] = []
        silent: list[Group] = []
        asked, used = own, 0
        while asked:
            for group in await gather(self._group(prompt, batch) for prompt in asked):
                (useful if has_signal(group.rewards) else silent).append(group)
            missing = max(wanted - len(useful), 0)
            asked = further[used : used + math.ceil(missing * settings.oversample)]
            used += len(asked)
        groups = useful + silent
        return SampledBatch(groups[:wanted], groups[wanted:])

    async def _scored(self, prompt: Prompt, batch: int) -> ScoredGroup:
        return await sampled_again(lambda: self._scored_once(prompt, batch))

    async def _scored_once(self, prompt: Prompt, batch: int) -> ScoredGroup:
        """Reward and reference at the same time."""
        if known := self._known(prompt, batch):
            return await self._with_reference(known)
        rollouts = await self._sample(prompt, batch)
        if self._workers.reference is None:
            return ScoredGroup(await self._graded(prompt, rollouts, batch), [])
        group, ref_logprobs = await gather(
            [self._graded(prompt, rollouts, batch), self._reference(prompt, rollouts)]
        )
        return ScoredGroup(group, ref_logprobs)

    async def _group(self, prompt: Prompt, batch: int) -> Group:
        if known := self._known(prompt, batch):
            return known

        async def graded() -> Group:
            return await self._graded(prompt, await self._sample(prompt, batch), batch)

        return await sampled_again(graded)

    def _known(self, prompt: Prompt, batch: int) -> Group | None:
        """The group, where it was finished before the run was interrupted."""
        return self._finished.get(batch, {}).get(prompt.uid)

    async def _graded(self, prompt: Prompt, rollouts: RolloutsRef, batch: int) -> Group:
        group = await self._rewarded(prompt, rollouts, batch)
        self._finished.setdefault(batch, {})[prompt.uid] = group
        return group

    async def _rewarded(self, prompt: Prompt, rollouts: RolloutsRef, batch: int) -> Group:
        if self._config.algorithm.advantage != "remax":
            return await self._workers.rewards.score(prompt, rollouts)
        group, baseline = await gather(
            [self._workers.rewards.score(prompt, rollouts), self._greedy_reward(prompt, batch)]
        )
        if math.isnan(baseline):  # without it no sample of the group has an advantage: none is trained
            group = replace(group, rewards=np.full_like(group.rewards, np.nan))
        return replace(group, baseline_reward=baseline)

    async def _sample(self, prompt: Prompt, batch: int) -> RolloutsRef:
        config = self._config
        seeds = [
            request_seed(config.seed, batch, prompt.uid, i) for i in range(config.batch.samples_per_prompt)
        ]
        sampling = Sampling(
            temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens
        )
        return await self._workers.rollouts.sample(prompt, seeds=seeds, sampling=sampling)

    async def _greedy_reward(self, prompt: Prompt, batch: int) -> float:
        """Of the most likely completion: ReMax's baseline."""
        sampling = Sampling(temperature=0.0, max_new_tokens=self._config.sampling.max_new_tokens)
        seed = request_seed(self._config.seed, batch, prompt.uid, -1)
        rollouts = await self._workers.rollouts.sample(prompt, seeds=[seed], sampling=sampling)
        return float((await self._workers.rewards.score(prompt, rollouts)).rewards[0])

    async def _with_reference(self, group: Group) -> ScoredGroup:
        return ScoredGroup(group, await self._reference(group.prompt, group.rollouts))

    async def _reference(self, prompt: Prompt, rollouts: RolloutsRef) -> list[np.ndarray]:
        if self._workers.reference is None:
            return []
        return await self._workers.reference.logprobs(prompt, rollouts)


def order_of(config: Config, prompts: Sequence[Prompt], state: OrderState) -> PromptOrder:
    """The order of a run's prompts, as it remembers it.

    All batches on their way together hold one epoch at most: where each held a whole one, epochs would be
    sampled side by side, and some prompts twice before others once.
    """
    own, dynamic = config.batch.prompts_per_step, config.dynamic_sampling
    further = (dynamic.max_extra_prompts or 3 * own) if dynamic.enabled else 0
    most = max(own, min(own + further, len(prompts) // (config.max_staleness + 1)))
    if config.data.order == "pass_rate":
        return Curriculum([p.uid for p in prompts], most, seed=config.seed, rates=state.pass_rates)
    if dynamic.enabled:
        return PromptStream(prompts, most, seed=config.seed, state=state)
    return EpochOrder(len(prompts), own, seed=config.seed)
