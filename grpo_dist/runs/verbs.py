"""The verbs of `own_loop.TrainingCluster` as coroutines."""

from __future__ import annotations

import asyncio
import operator
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grpo_dist.algorithms.moments import Moments
from grpo_dist.config import Config
from grpo_dist.data.order import OrderState
from grpo_dist.errors import SamplesLost, UserError
from grpo_dist.evaluation.sampling import evaluate
from grpo_dist.health.bounds import HealthState
from grpo_dist.health.watch import TRAINED_TOKENS, HealthWatch
from grpo_dist.loop.groups import FrozenModels, GroupDraw, GroupScorer, ScoredBatch, ScoredGroup
from grpo_dist.loop.kl_controller import KLController
from grpo_dist.loop.metrics import staleness_metrics, trained_metrics
from grpo_dist.loop.pipeline import build_order
from grpo_dist.loop.progress import ScheduleState
from grpo_dist.loop.sampling_schedule import SamplingSchedule, sampling_used
from grpo_dist.loop.staging import Staging
from grpo_dist.loop.sync_probe import SyncProbe
from grpo_dist.policy.full_weights import why_no_export
from grpo_dist.runs.notes import Notes
from grpo_dist.runs.prepare import RunInputs
from grpo_dist.runs.update_checks import check_division, check_fit, check_own_advantages
from grpo_dist.runtime.concurrency import deadline, gather, sample_until_enough
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.seeds import request_seeds
from grpo_dist.types import Group, Prompt, Rollout, Sampling, training_rows
from grpo_dist.workers import Workers

if TYPE_CHECKING:  # Ray takes seconds to import
    from actors.cluster import Cluster

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """A prompt and its samples, not scored yet."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    reference: Any = field(default=None, repr=False, compare=False)  # to the same samples, for other workers


@dataclass(frozen=True, slots=True)
class RunningUpdate:
    """An update that nobody has the metrics of yet."""

    groups: tuple[ScoredGroup, ...]
    advantages: list[np.ndarray] | None  # of the caller; float32 [G] of each group
    task: asyncio.Task[dict[str, float]]

    def trains(self, groups: Sequence[ScoredGroup]) -> bool:
        """Return whether it trains on exactly these ``groups``."""
        return len(groups) == len(self.groups) and all(map(operator.is_, groups, self.groups))

    def uses(self, advantages: list[np.ndarray] | None) -> bool:
        """Return whether it trains with equal ``advantages``."""
        if advantages is None or self.advantages is None:
            return advantages is self.advantages
        pairs = zip(advantages, self.advantages, strict=False)
        return len(advantages) == len(self.advantages) and all(np.array_equal(a, b) for a, b in pairs)


class Verbs:
    """The verbs as coroutines of one event loop."""

    def __init__(self, config: Config, inputs: RunInputs, actors: Cluster) -> None:
        self.inputs, self.step = inputs, 0
        unrecorded = config.tracking.model_copy(update={"samples": False})
        self._config = config.model_copy(update={"tracking": unrecorded})
        self._actors, self._stack = actors, AsyncExitStack()
        self._notes = Notes()
        self._order = build_order(config, inputs.prompts, OrderState())
        self._known = {prompt.uid for prompt in inputs.prompts}  # the caller may sample others, too
        self._batch = 0  # of `batch`: the step, and the one after it while an update runs
        self._indices: dict[int, list[int]] = {}  # of the order, by batch
        self._drawn = Counter[str]()  # samples of each prompt since the last update
        self._synced = 0  # version that the engines hold
        self._probed = -1  # version whose probe was started
        self._running: RunningUpdate | None = None

    async def start(self) -> None:
        config, explain = self._config, self._actors.where_stuck
        await self._stack.enter_async_context(self._actors)
        up = deadline(config.cluster.timeouts.up_s, "start: actors up and models loaded", explain=explain)
        async with up:
            self._workers = await self._actors.start_training(self.inputs.model_dir)
        await self._workers.sync.push(version=0)
        self._parts(self._workers)
        await self._stack.enter_async_context(self._probe)

    async def stop(self) -> None:
        if self._running is not None:
            self._running.task.cancel()
            await asyncio.gather(self._running.task, return_exceptions=True)
        await self._stack.aclose()

    def _parts(self, workers: Workers) -> None:
        config = self._config
        self._schedule = SamplingSchedule(config.sampling, ScheduleState())
        self._sampling: dict[int, Sampling] = {}  # of the current step
        self._draw = GroupDraw.from_config(config.batch, config.algorithm, config.data)
        self._scorer = GroupScorer(
            workers,
            self._sampling,
            seed=config.seed,
            draw=self._draw,
            finished={},
            models=FrozenModels(workers, config.distillation, with_kl=config.has_kl_term),
        )
        self._staging = Staging(config, workers.policy, Moments(), self.inputs.demonstrations)
        self._probe = SyncProbe(config, workers, self.inputs.prompts, self._notes, start=0)
        self._health = HealthWatch(config, self._notes, HealthState())
        self._kl = KLController(config.algorithm.kl)

    async def batch(self) -> list[Prompt] | None:
        """Return the prompts of the next update to begin; None where `steps` have begun."""
        number = self._batch
        if number >= self._config.steps:
            return None
        if number not in self._indices:
            self._indices[number] = self._order.take(number)
        return [self.inputs.prompts[self._order.prompt(index)] for index in self._indices[number]]

    async def sample(self, prompts: Sequence[Prompt], samples: int | None) -> list[SampledGroup]:
        if self._synced == self.step != self._probed:
            self._probed = self.step
            self._probe.begin(self.step)
        count, sampling = samples or self._draw.samples, self._sampling_now()
        least = min(count, self._draw.least)
        step, drawn = self.step, self._drawn  # an update may end before the tasks begin, or draw again

        async def one(prompt: Prompt, first: int) -> SampledGroup:
            own = replace(self._scorer.sampling_for(prompt, sampling), least=least)
            firsts = [first]  # of each draw: those of another call stay apart

            def seeds(number: int) -> list[int]:
                if number == len(firsts):
                    firsts.append(drawn[prompt.uid])
                    drawn[prompt.uid] += count
                samples = range(firsts[number], firsts[number] + count)
                return request_seeds(self._config.seed, step, prompt.uid, samples)

            async def fetched(seeds: Sequence[int]) -> SampledGroup:
                found = await self._workers.rollouts.sample(prompt, seeds=seeds, sampling=own)
                return SampledGroup(prompt, await _fetched(found), found)

            return await sample_until_enough(fetched, seeds, least=least)

        asked = []
        for prompt in prompts:
            asked.append(one(prompt, drawn[prompt.uid]))
            drawn[prompt.uid] += count
        return await self._within("sampled", asked)

    def _sampling_now(self) -> Sampling:
        return self._sampling.setdefault(self.step, self._schedule.of(self.step))

    async def score(self, sampled: Sequence[SampledGroup]) -> list[ScoredGroup]:
        self._sampling_now()  # a greedy baseline is drawn like the samples

        async def one(group: SampledGroup) -> ScoredGroup:
            try:
                known = group.rollouts if group.reference is None else group.reference
                return await self._scorer.score_samples(group.prompt, known, self.step)
            except SamplesLost:  # with the node that held them; here they still are
                return await self._scorer.score_samples(group.prompt, group.rollouts, self.step)

        return await self._within("scored", [one(group) for group in sampled])

    async def update(
        self, scored: Sequence[ScoredGroup], advantages: Sequence[np.ndarray] | None
    ) -> dict[str, float]:
        """Train, to the end also where this call is cancelled: the ranks do not stop halfway. The same groups
        and advantages once more then get the metrics of that update.

        Raises UserError where only the advantages are others.
        """
        # Copies: the caller may write into its own.
        own = None if advantages is None else [np.array(a, np.float32) for a in advantages]
        if self._running is None or not self._running.trains(scored):
            await self._settled()
            task = asyncio.create_task(self._update(scored, own), name=f"update {self.step + 1}")
            self._running = RunningUpdate(tuple(scored), own, task)
        elif not self._running.uses(own):
            await self._settled()
            raise UserError(
                "update(): an update of these groups with other advantages was interrupted, has ended since "
                "and counts; sample again"
            )
        return await self._result_of(self._running)

    async def _settled(self) -> None:
        """Wait for an update that runs. Raises its error where its caller was interrupted."""
        if (running := self._running) is not None:
            await asyncio.wait([running.task])  # bounded: by the deadlines of the policy
            if self._running is running:  # its caller has not been told
                await self._result_of(running)

    async def _result_of(self, running: RunningUpdate) -> dict[str, float]:
        await asyncio.wait([running.task])  # bounded: by the deadlines of the policy
        if self._running is running:
            self._running = None
        return running.task.result()  # bounded: it is done

    async def _update(
        self, scored: Sequence[ScoredGroup], advantages: list[np.ndarray] | None
    ) -> dict[str, float]:
        groups = [s.group for s in scored]
        check_division(self._config.batch.updates_per_step, len(groups))
        self._check_staleness(groups)
        if advantages is not None:
            check_own_advantages(self._config.algorithm, self._config.distillation)
            check_fit(advantages, groups)
        self._batch = self.step + 1
        try:
            return await self._train(ScoredBatch(list(scored), advantages=advantages))
        finally:
            self._batch = self.step  # where the update has failed, its prompts are next again

    async def _train(self, batch: ScoredBatch) -> dict[str, float]:
        step, timer, groups = self.step, Stopwatch(), [s.group for s in batch.scored]
        staged = await self._staging.take(step, batch, kl_coef=self._kl.coef)
        metrics = dict(staged.metrics)
        if self._synced == step:
            metrics |= await self._probe.finish(step, timer)
        judged = self._health.judge_batch(
            step + 1, groups, metrics, own_advantages=batch.advantages is not None
        )
        trainable, metrics = judged
        if trainable:
            bounds = self._health.update_bounds()
            policy = self._workers.policy
            metrics |= await policy.update(staged.updates, kl_coef=self._kl.coef, bounds=bounds)
            self._probe.after_update(step, metrics)
            self._health.after_update(step + 1, metrics, groups)
            metrics |= trained_metrics(staged.rows, staged.tokens, staged.needed_tokens, metrics)
        metrics |= self._kl.observe(metrics)
        metrics[TRAINED_TOKENS] = float(staged.loss_tokens if trainable else 0)
        alarms, counts = self._health.examine(step + 1, metrics)
        indices = self._indices.pop(step, [])
        self._order.trained(indices, [g for g in groups if g.prompt.uid in self._known])
        self._schedule.observe(groups, sampling_used(groups, self._sampling_now()))
        self._sampling.clear()
        self._drawn, self.step = Counter(), step + 1
        self._scorer.forget(step)
        self._health.act(self.step, alarms, metrics | counts, groups)
        return metrics | counts

    async def sync(self) -> dict[str, float]:
        await self._settled()
        metrics = await self._workers.sync.push(version=self.step)
        every = self._config.reference.refresh_every
        # At the first sync from a multiple on: a caller may make several updates before it syncs.
        refreshes = every > 0 and self.step // every > self._synced // every
        if self._workers.reference_sync is not None and refreshes:
            await self._workers.reference_sync.refresh()
        self._synced = self.step
        return metrics

    async def evaluate(self) -> dict[str, float]:
        explain = self._workers.where_stuck
        sets = self.inputs.eval_sets
        return await evaluate(self._config, self._workers, sets, self._notes, step=self.step, explain=explain)

    async def export(self, directory: Path) -> None:
        """Write the model. Raises UserError where ``directory`` holds anything but an earlier export."""
        _check_replaceable(directory)
        await self._settled()
        directory.parent.mkdir(parents=True, exist_ok=True)
        await self._workers.policy.export(directory, tokenizer_dir=self.inputs.model_dir)

    async def _within(self, done: str, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Return the results of ``work``, within `cluster.timeouts.sample_s`."""
        what, explain = f"{len(work)} groups of step {self.step} are {done}", self._workers.where_stuck
        async with deadline(self._config.cluster.timeouts.sample_s, what, explain=explain):
            return await gather(work)

    def _check_staleness(self, groups: Sequence[Group]) -> None:
        rows = training_rows([rollout for group in groups for rollout in group.rollouts])
        staleness = staleness_metrics(rows, self.step)["rollout/staleness_max"]
        allowed = self._config.max_staleness
        if staleness <= allowed:
            return
        forgotten = "" if self._synced == self.step else ", and sync() was not called since the last update"
        raise UserError(
            f"update(): its samples are {staleness:.0f} update(s) older than the policy, and `max_staleness` "
            f"= {allowed}{forgotten}; call sync() after update() and before sample(), or raise that bound"
        )


async def _fetched(rollouts: Any) -> tuple[Rollout, ...]:
    """Return the samples behind a reference, or the samples themselves. Raises SamplesLost."""
    if isinstance(rollouts, tuple):
        return rollouts
    from actors.lifecycle.calls import fetched  # imports Ray, whose reference it is

    found: tuple[Rollout, ...] = await fetched(rollouts)
    return found


def _check_replaceable(directory: Path) -> None:
    """Raise UserError where a model in place of ``directory`` would delete what is no earlier export."""
    if reason := why_no_export(directory):
        raise UserError(
            f"export(): {directory} is no earlier export ({reason}), and an export replaces what is there; "
            "choose a directory that is new, empty, or holds an earlier export"
        )
