"""The queue of batches on their way to training, launched in order.

Staleness is bounded by admission: the driver names the last batch it may launch. No finished group is dropped
for being late, which would favour short answers. `first_come` has the other `batch.order`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from grpo_dist.config import Config
from grpo_dist.data.curriculum import Curriculum, OwnOrder
from grpo_dist.data.order import EpochOrder, OrderState, PromptOrder
from grpo_dist.data.pools import PoolOrder
from grpo_dist.data.stream import LengthOrder, PromptStream, SolvedPrompts, most_at_once
from grpo_dist.loop.admission import Drawn
from grpo_dist.loop.frozen_models import FrozenModels
from grpo_dist.loop.groups import GroupDraw, GroupScorer, ScoredBatch, as_drawn
from grpo_dist.loop.progress import PipelineState, SampledBatch
from grpo_dist.loop.sampling_schedule import SamplingSchedule
from grpo_dist.loop.updates import signal_rule
from grpo_dist.runtime.concurrency import deadline, finished_unless_stopped
from grpo_dist.types import Prompt
from grpo_dist.workers import Workers


class Pipeline:
    """Launched batches, oldest first; an async context manager, which cancels what is left in it.

    ``first``: the next batch to launch. ``state``: what a checkpoint kept.
    """

    def __init__(
        self, config: Config, workers: Workers, prompts: Sequence[Prompt], first: int, state: PipelineState
    ) -> None:
        self._prompts, self._where_stuck = prompts, workers.where_stuck
        self._batch_config, self._max_staleness = config.batch, config.max_staleness
        self._dynamic, self._per_step = config.dynamic_sampling, config.batch.prompts_per_step
        self._has_signal = signal_rule(config.algorithm, config.rewards, config.dynamic_sampling.metric)
        self._drains = config.weight_sync.mode == "drain"
        self._sample_s = config.cluster.timeouts.sample_s
        self._schedule = SamplingSchedule(config.sampling, state.schedule)
        self._sampling = dict(state.sampling)  # of launched batches
        for batch in (*state.ahead, *state.partial):  # an earlier version did not keep it
            self._sampling.setdefault(batch, self._schedule.of(batch))
        self._scorer = GroupScorer(
            workers,
            self._sampling,
            seed=config.seed,
            draw=GroupDraw.of(config.batch, config.algorithm, config.data),
            finished={b: as_drawn(groups, self._sampling[b]) for b, groups in state.partial.items()},
            scored_by=FrozenModels(workers, config.distillation, with_kl=config.has_kl_term),
        )
        self._order_indices = {batch: list(own) for batch, own in state.order_indices.items()}
        self._order = order_of(config, prompts, state.order)
        self._most_at_once = most_at_once(config.data.weights, prompts)
        self._drops_solved = config.data.drop_solved is not None
        self._restore(state, first=first)

    def _restore(self, state: PipelineState, *, first: int) -> None:
        """Begin with what is on its way in ``state``; ``first`` is the next batch."""
        self._next_batch = first
        self._restored = {b: self._as_drawn(b, own) for b, own in state.ahead.items()}
        self._launched: deque[tuple[int, asyncio.Task[ScoredBatch]]] = deque()

    async def launch(self, *, through: int) -> None:
        """Start sampling every batch up to and including ``through`` that is not launched yet."""
        while self._next_batch <= through:
            batch = self._next_batch
            if batch not in self._order_indices:
                self._order_indices[batch] = await self._chosen(batch)
            self._sampling.setdefault(batch, self._schedule.of(batch))
            self._launched.append((batch, asyncio.create_task(self._batch(batch), name=f"batch {batch}")))
            self._next_batch += 1

    async def _chosen(self, batch: int) -> list[int]:
        if isinstance(self._order, OwnOrder):  # in a thread: groups are received and scored meanwhile
            return await asyncio.to_thread(self._order.take, batch)
        return self._order.take(batch)

    @property
    def oldest(self) -> asyncio.Task[ScoredBatch] | None:
        """The launched batch that `next` waits for; None when nothing is launched."""
        return self._launched[0][1] if self._launched else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the prompt order after the last batch."""
        return {"data/left_out": float(len(self._order.state.left_out))} if self._drops_solved else {}

    async def next(self, *, unless: Callable[[], bool] = lambda: False) -> ScoredBatch | None:
        """Wait for the oldest launched batch and return it, its groups in prompt order.

        Returns None as soon as ``unless`` is true while the batch is not finished.
        """
        batch, task = self._launched[0]
        async with self._deadline(batch):
            if not await finished_unless_stopped(task, unless):
                return None
        self._launched.popleft()
        done = task.result()  # bounded: it is done
        self._order.trained(self._order_indices.pop(batch), done.sampled)
        self._schedule.observe(done.sampled, self._sampling.pop(batch))
        self._restored.pop(batch, None)
        self._scorer.forget(batch)
        return done

    async def settle(self, *, unless: Callable[[], bool] = lambda: False) -> bool:
        """In mode ``drain``, wait until nothing is in flight, so that each sample has a single version.

        Returns False as soon as ``unless`` is true while something is in flight.
        """
        if self._drains:
            for batch, task in self._launched:
                async with self._deadline(batch):
                    if not await finished_unless_stopped(task, unless):
                        return False
                    task.result()  # bounded: it is done
        return True

    async def renew_reference(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Call ``refresh``, and recompute the reference log-probs of launched batches.

        Launched batches finish first: their calls are queued in front of ``refresh``.
        """
        finished = [await self._wait(batch, task) for batch, task in self._launched]
        await refresh()
        for i, done in enumerate(finished):
            batch = self._launched[i][0]
            work = self._scorer.renewed(done)
            renewed = asyncio.create_task(work, name=f"batch {batch}")
            await self._wait(batch, renewed)
            self._launched[i] = (batch, renewed)

    def state(self) -> PipelineState:
        """Return what a checkpoint keeps: finished groups of launched batches, and the state of the order.

        A resumed run launches unfinished batches again, on the same prompts.
        """
        ahead = dict(self._restored) | {
            batch: task.result().without_reference()  # bounded: it is done
            for batch, task in self._launched
            if task.done() and not task.cancelled() and task.exception() is None
        }
        partial = {
            batch: groups
            for batch, _ in self._launched
            if batch not in ahead and (groups := self._scorer.finished(batch))
        }
        return PipelineState(
            ahead,
            partial,
            dict(self._order_indices),
            self._order.state,
            dict(self._sampling),
            self._schedule.state,
        )

    async def cancel(self) -> None:
        """Cancel launched batches; `state` keeps their finished groups."""
        tasks = [task for _, task in self._launched]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.cancel()

    async def _wait(self, batch: int, task: asyncio.Task[ScoredBatch]) -> ScoredBatch:
        async with self._deadline(batch):
            return await task

    def _as_drawn(self, batch: int, restored: SampledBatch) -> SampledBatch:
        sampling = self._sampling[batch]
        return SampledBatch(as_drawn(restored.groups, sampling), as_drawn(restored.discarded, sampling))

    def _deadline(self, batch: int) -> AbstractAsyncContextManager[None]:
        stage = f"sample: batch {batch} sampled and scored"
        return deadline(self._sample_s, stage, explain=self._where_stuck)

    async def _batch(self, batch: int) -> ScoredBatch:
        if batch in self._restored:
            return await self._scorer.with_reference(self._restored[batch])
        prompts = [self._prompts[self._order.prompt(index)] for index in self._order_indices[batch]]
        if not self._dynamic.enabled:
            return await self._scorer.score(prompts, batch)
        sampled = await self._scorer.score_with_signal(
            prompts,
            batch,
            wanted=self._per_step,
            oversample=self._dynamic.oversample,
            has_signal=self._has_signal,
        )
        return await self._scorer.with_reference(sampled)


def order_of(config: Config, prompts: Sequence[Prompt], state: OrderState) -> PromptOrder:
    """Build the order of a run's prompts from its ``state``."""
    own, dynamic, data = config.batch.prompts_per_step, config.dynamic_sampling, config.data
    by_group = config.batch.order == "completion"
    most = most_at_once(data.weights, prompts)
    bounds = Drawn.of(config.batch, dynamic, max_staleness=config.max_staleness, prompts=most)
    drawn, in_flight = bounds.per_batch, bounds.in_flight
    taken = 1 if by_group else drawn  # of an order that gives each prompt once
    samples = config.batch.samples_per_prompt
    solved = SolvedPrompts(prompts, state.left_out, share=data.drop_solved, keep=in_flight, samples=samples)
    if data.order == "length":
        window = data.length_window or 8
        return LengthOrder(
            prompts, taken, per_step=own, window=window, seed=config.seed, state=state, solved=solved
        )
    if data.order == "pass_rate":
        return Curriculum([p.uid for p in prompts], drawn, seed=config.seed, rates=state.pass_rates)
    if data.has_own_order:
        own_order, rates = (data, config.code_paths), state.pass_rates
        limit_s = config.cluster.timeouts.own_code_s
        return OwnOrder(prompts, drawn, *own_order, seed=config.seed, rates=rates, limit_s=limit_s)
    if data.order == "pools" and data.pools is not None:
        return PoolOrder(prompts, drawn, data.pools, seed=config.seed, state=state)
    if by_group or dynamic.enabled or data.weights or data.drop_solved is not None:
        return PromptStream(
            prompts, taken, seed=config.seed, state=state, weights=data.weights, solved=solved
        )
    return EpochOrder(len(prompts), own, seed=config.seed)
