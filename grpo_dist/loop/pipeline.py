"""The queue of batches in flight, launched in order, and the weight sync after a step.

Admission bounds staleness: the driver passes the last batch that may be launched. No finished group is
dropped for being late, which would favour short answers. `first_come` has the other `batch.order`.

Dynamic sampling replaces a zero-variance group as soon as it is known (`Refill`), in launch order:

    step's prompts    p0 signal ....  p1 none  p2 signal  p3 none
    further prompts                       p4 ......... none   p5 signal
                                          (for p1)         p6 (for p4)

The groups in launch order determine which prompts are launched, never which group completes first. With
``oversample`` 1 they are the shortest prefix of the order with ``wanted`` groups with a signal: n launches
are due only while n - ``wanted`` of the launched groups are known to lack one. With more than 1, each prefix
of known groups adds the launches that it makes due.

Limits for drawn prompts and groups in flight, so that no prompt is sampled twice before every other is
sampled once:

    n   `batch.prompts_per_step`
    S   `max_staleness`
    P   prompts that can be drawn without repeating one, see `most_at_once`
    r   `dynamic_sampling.max_extra_prompts`, or 3 n; 0 without dynamic sampling
    f   `batch.order.oversample`, or 1 + S / 2

`batch.order: launched` has S + 1 batches in flight, each of n prompts and r to replace zero-variance groups:

    per_draw     = n + r, at most P / (S + 1), at least n
    drawn        = (S + 1) per_draw

`batch.order: completion` launches groups one by one:

    replacements = r, at most P / (S + 1) - n, at least 0     zero-variance groups that one step replaces
    groups       = n f, at most P - 2 replacements, at least n
    per_draw     = groups + 2 replacements, at most P, at least groups
    drawn        = per_draw

Twice the replacements: between the end of a step and the next launch, the prompts that this step replaced
are not free yet, and the next step may replace as many.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

from grpo_dist.algorithms.schedules import is_due
from grpo_dist.batch.signal import SignalRule
from grpo_dist.config import Config, DynamicSamplingConfig, ReferenceConfig
from grpo_dist.config.data import (
    CompletionOrder,
    LengthOrderConfig,
    PassRateOrderConfig,
    PoolsOrderConfig,
    UserOrderConfig,
)
from grpo_dist.data.columns import uids_of
from grpo_dist.data.order import Curriculum, EpochOrder, OrderState, PromptOrder, UserOrder
from grpo_dist.data.pools import PoolOrder
from grpo_dist.data.stream import LengthOrder, PromptStream, SolvedPrompts, most_at_once
from grpo_dist.loop.groups import FrozenModels, GroupDraw, GroupScorer, ScoredBatch
from grpo_dist.loop.progress import PipelineState, SampledBatch
from grpo_dist.loop.sampling_schedule import SamplingSchedule
from grpo_dist.runtime.concurrency import deadline, gather, task_group, wait_unless_stopped
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.types import Group, Prompt
from grpo_dist.workers import Workers


@dataclass(frozen=True, slots=True)
class Admission:
    """Limits of one run; see the module docstring.

    Attributes:
        groups: groups in flight at once, with `batch.order` completion.
        replacements: zero-variance groups that a step may replace, with that order.
        per_draw: prompts drawn by one batch, or one launch, including spare ones.
        drawn: prompts drawn by all batches in flight.
    """

    groups: int
    replacements: int
    per_draw: int
    drawn: int

    @classmethod
    def from_config(cls, config: Config, prompts: Sequence[Prompt]) -> Admission:
        batch, dynamic, staleness = config.batch, config.dynamic_sampling, config.max_staleness
        n, available = batch.prompts_per_step, most_at_once(config.data.weights, prompts)
        further = (dynamic.max_extra_prompts or 3 * n) if isinstance(dynamic, DynamicSamplingConfig) else 0
        share = available // (staleness + 1)
        replacements = max(0, min(further, share - n))
        oversample = batch.order.oversample if isinstance(batch.order, CompletionOrder) else None
        oversample = oversample or 1 + staleness / 2
        groups = max(n, min(rounded_up(n * oversample), available - 2 * replacements))
        if isinstance(batch.order, CompletionOrder):
            per_draw = max(groups, min(available, groups + 2 * replacements))
            return cls(groups, replacements, per_draw, per_draw)
        per_draw = max(n, min(n + further, share))
        return cls(groups, replacements, per_draw, per_draw * (staleness + 1))


def rounded_up(product: float) -> int:
    """Round up the product of a count and a configured factor: 50 * 1.1 gives 55, although in floating point
    it is above 55.
    """
    return math.ceil(round(product, 9))


class Refill:
    """Samples one batch.

    Args:
        sample: samples and scores the group of a prompt.
        has_signal: whether a step can learn from a group.
        prompts: prompts of the step, then spare ones, in order.
        wanted: groups of the batch, and prompts of the step.
        oversample: further prompts launched per missing group, once all groups of the step's prompts are
            known.
    """

    def __init__(
        self,
        sample: Callable[[Prompt], Awaitable[Group]],
        has_signal: Callable[[Group], bool],
        prompts: Sequence[Prompt],
        *,
        wanted: int,
        oversample: float,
    ) -> None:
        self._sample, self._has_signal, self._prompts = sample, has_signal, prompts
        self._wanted, self._oversample = wanted, oversample
        self._launched = 0
        self._groups: dict[int, tuple[Group, bool]] = {}  # by launch; True: it has a signal
        self._silent = 0
        self._prefix, self._useful = 0, 0  # known groups without a gap, and how many have a signal

    async def batch(self) -> SampledBatch:
        """Return ``wanted`` groups, with a signal first, and the rest as discarded. If the prompts run out,
        zero-variance groups fill the batch.
        """
        async with task_group() as tasks:
            self._launch(tasks, self._wanted)
        sampled = [self._groups[i] for i in range(self._launched)]
        groups = [group for group, useful in sampled if useful] + [
            group for group, useful in sampled if not useful
        ]
        return SampledBatch(groups[: self._wanted], groups[self._wanted :])

    def _launch(self, tasks: asyncio.TaskGroup, due: int) -> None:
        while self._launched < min(due, len(self._prompts)):
            tasks.create_task(self._one(tasks, self._launched))
            self._launched += 1

    async def _one(self, tasks: asyncio.TaskGroup, index: int) -> None:
        group = await self._sample(self._prompts[index])
        useful = self._has_signal(group)
        self._groups[index] = group, useful
        self._silent += not useful
        self._launch(tasks, max(self._wanted + self._silent, self._due_by_prefix()))

    def _due_by_prefix(self) -> int:
        """Return how many prompts are due after the prefix has grown; 0 if it has not."""
        due = 0
        while self._prefix in self._groups:
            self._useful += self._groups[self._prefix][1]
            self._prefix += 1
            missing = self._wanted - self._useful
            if self._prefix >= self._wanted and missing > 0:
                due = max(due, self._prefix + rounded_up(missing * self._oversample))
        return due


class Pipeline:
    """Launched batches, oldest first; an async context manager, which cancels the batches left in it.

    ``first``: the next batch to launch. ``state``: from a checkpoint.
    """

    def __init__(
        self, config: Config, workers: Workers, prompts: Sequence[Prompt], first: int, state: PipelineState
    ) -> None:
        self._prompts, self._where_stuck = prompts, workers.where_stuck
        self._max_staleness = config.max_staleness
        dynamic = config.dynamic_sampling
        self._dynamic = dynamic if isinstance(dynamic, DynamicSamplingConfig) else None
        chosen = self._dynamic or DynamicSamplingConfig(enabled=True)
        self._has_signal = SignalRule(
            config.algorithm, chosen.metric, config.rewards.weights, mean_low=chosen.mean_low,
            mean_high=chosen.mean_high, by_source=config.source_algorithms,
        )  # fmt: skip
        self._per_step = config.batch.prompts_per_step
        self._drains = config.weight_sync.mode == "drain"
        self._sample_s = config.cluster.timeouts.sample_s
        self._schedule = SamplingSchedule(config.sampling, state.schedule)
        self._sampling = dict(state.sampling)  # settings of launched batches
        self._scorer = GroupScorer(
            workers,
            self._sampling,
            seed=config.seed,
            draw=GroupDraw.from_config(config),
            finished=state.partial,
            models=FrozenModels(workers, config.distillation, with_kl=config.has_kl_term),
        )
        self._order_indices = {batch: list(indices) for batch, indices in state.order_indices.items()}
        self._admission = Admission.from_config(config, prompts)
        self._order = build_order(config, prompts, state.order, self._admission)
        self._drops_solved = config.data.drop_solved is not None
        self._restore(state, first=first)

    def _restore(self, state: PipelineState, *, first: int) -> None:
        """Begin with the batches in flight in ``state``; ``first`` is the next batch."""
        self._next_batch = first
        self._restored = dict(state.ahead)
        self._launched: deque[tuple[int, asyncio.Task[ScoredBatch]]] = deque()

    async def launch(self, *, through: int) -> None:
        """Start sampling every batch up to and including ``through`` that is not launched yet."""
        while self._next_batch <= through:
            batch = self._next_batch
            if batch not in self._order_indices:
                self._order_indices[batch] = await self._take(batch)
            self._sampling.setdefault(batch, self._schedule.of(batch))
            self._launched.append((batch, asyncio.create_task(self._batch(batch), name=f"batch {batch}")))
            self._next_batch += 1

    async def _take(self, batch: int) -> list[int]:
        if isinstance(self._order, UserOrder):  # in a thread: the loop keeps receiving groups
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
            if not await wait_unless_stopped(task, unless):
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
                    if not await wait_unless_stopped(task, unless):
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
            work = self._scorer.renew(done)
            renewed = asyncio.create_task(work, name=f"batch {batch}")
            await self._wait(batch, renewed)
            self._launched[i] = (batch, renewed)

    def state(self) -> PipelineState:
        """Return what a checkpoint keeps: finished groups of launched batches, and the order's state.

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

    def _deadline(self, batch: int) -> AbstractAsyncContextManager[object]:
        stage = f"sample: batch {batch} sampled and scored"
        return deadline(self._sample_s, stage, explain=self._where_stuck)

    async def _batch(self, batch: int) -> ScoredBatch:
        if batch in self._restored:
            return await self._scorer.with_reference(self._restored[batch])
        prompts = [self._prompts[self._order.prompt(index)] for index in self._order_indices[batch]]
        if self._dynamic is None:
            return ScoredBatch(await gather(self._scorer.sample_and_score(p, batch) for p in prompts))
        sample, oversample = partial(self._scorer.sample_and_grade, batch=batch), self._dynamic.oversample
        refill = Refill(sample, self._has_signal, prompts, wanted=self._per_step, oversample=oversample)
        return await self._scorer.with_reference(await refill.batch())


def build_order(
    config: Config, prompts: Sequence[Prompt], state: OrderState, admission: Admission | None = None
) -> PromptOrder:
    """Build the order of a run's prompts from its ``state``. ``admission``: the run's; None: computed."""
    data, seed, per_step = config.data, config.seed, config.batch.prompts_per_step
    admission = admission or Admission.from_config(config, prompts)
    by_group = config.batch.order.name == "completion"
    per_take = 1 if by_group else admission.per_draw  # per call, of an order that gives each prompt once
    solved = SolvedPrompts(
        prompts,
        state.left_out,
        share=data.drop_solved,
        keep=admission.drawn,
        samples=config.batch.samples_per_prompt,
    )
    if isinstance(data.order, LengthOrderConfig):
        window = data.order.window
        return LengthOrder(
            prompts, per_take, per_step=per_step, window=window, seed=seed, state=state, solved=solved
        )
    if isinstance(data.order, PassRateOrderConfig):
        return Curriculum(uids_of(prompts), admission.per_draw, seed=seed, rates=state.pass_rates)
    if isinstance(data.order, UserOrderConfig):
        user_order, limit_s = (data.order, config.code_paths), config.cluster.timeouts.user_code_s
        return UserOrder(
            prompts, admission.per_draw, *user_order, seed=seed, rates=state.pass_rates, limit_s=limit_s
        )
    if isinstance(data.order, PoolsOrderConfig):
        assert data.pools_by is not None
        return PoolOrder(
            prompts, admission.per_draw, data.pools_by, data.order.half_life, seed=seed, state=state
        )
    if by_group or config.dynamic_sampling.enabled or data.weights or data.drop_solved is not None:
        return PromptStream(prompts, per_take, seed=seed, state=state, weights=data.weights, solved=solved)
    return EpochOrder(len(prompts), per_step, seed=seed)


async def publish(
    version: int,
    settings: ReferenceConfig,
    workers: Workers,
    pipeline: Pipeline,
    timer: Stopwatch,
    stop_requested: Callable[[], bool],
) -> dict[str, float]:
    """Drain, push ``version`` to the engines, and refresh the reference if it is due; return metrics.

    After a stop request the run does not wait for the drain, and pushes only if it is done. If a refresh is
    due, it waits: a checkpoint after a refresh must have the new reference.
    """
    refreshes = workers.reference_sync is not None and is_due(version, settings.refresh_every)
    metrics: dict[str, float] = {}
    with timer("drain"):
        drained = await (pipeline.settle() if refreshes else pipeline.settle(unless=stop_requested))
    with timer("sync"):
        if drained:
            metrics = await workers.sync.push(version=version)
    if workers.reference_sync and refreshes:
        with timer("reference"):
            await pipeline.renew_reference(workers.reference_sync.refresh)
    return metrics
