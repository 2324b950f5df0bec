"""Everything around the algorithm: recording, health, evaluation, checkpoints and preemption. The loops of
GRPO and of supervised training share `StepChores`.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

from grpo_dist.algorithms.schedules import is_due
from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.config import CheckpointConfig, Config, EvaluationConfig
from grpo_dist.errors import RERUN, Preempted
from grpo_dist.health import SKIPPED, HealthWatch
from grpo_dist.loop.concurrent_evaluation import ConcurrentEvaluation, discard_snapshots
from grpo_dist.loop.groups import ScoredBatch
from grpo_dist.loop.ledger import ledger_entry
from grpo_dist.loop.metrics import StagedCounts, UserMetrics, throughput_metrics, trained_metrics
from grpo_dist.loop.pipeline import Pipeline
from grpo_dist.loop.progress import Progress, ends_early
from grpo_dist.loop.sampling_schedule import KLController
from grpo_dist.loop.staging import Staged, Staging
from grpo_dist.plugins.inputs import MetricInputs
from grpo_dist.runtime.concurrency import run_unless_stopped
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.types import Group
from grpo_dist.workers import Workers


class Checkpointer(Protocol):
    """`runs.checkpoint.Checkpoints` in production. Writes in the background; `settle` waits for it."""

    async def save(self, step: int, workers: Workers, progress: Progress) -> None: ...
    async def settle(self) -> None: ...


class StepChores:
    """Does what the loops of GRPO and of supervised training share: traces, measurements, checkpoints, and
    the end of a run on request.

    Args:
        state: returns the state of the loop after a step, for a checkpoint.
        stop_requested: true once the run is to save and end.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        recorder: Recorder,
        checkpoints: Checkpointer,
        state: Callable[[int, bool], Progress],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._config = config
        self._workers, self._recorder, self._checkpoints, self._state = workers, recorder, checkpoints, state
        self._stop_requested, self._evaluation_pending = stop_requested, False
        self._saved_step = 0  # step of the newest checkpoint; 0 needs none
        self._saved_s = asyncio.get_running_loop().time()  # when that save began
        self._best: tuple[int, float] | None = None  # step and value of `checkpoint.keep_best`
        self._left: frozenset[str] = frozenset()  # draining nodes that the last save knew of

    async def before_update(self, step: int) -> None:
        """Have the policy trace the update of ``step`` if `profile.steps` has it."""
        if step in self._config.profile.steps:
            await self._workers.policy.trace_next(self._recorder.directory, step)

    async def _final_metrics(
        self,
        staged: StagedCounts,
        groups: Sequence[Group],
        timer: Stopwatch,
        update: Mapping[str, float],
        *,
        trained: bool,
    ) -> dict[str, float]:
        """Stop the clock of the step; return usage, throughput and training metrics. ``groups``: for the
        throughput. ``update``: metrics of the update.
        """
        usage = self._workers.usage
        metrics = await usage.read() if usage else {}
        metrics |= throughput_metrics(groups, timer.stop())
        return metrics | trained_metrics(staged, update, trained=trained)

    async def _measure(
        self, step: int, phase: str, measurement: Callable[[], Coroutine[Any, Any, dict[str, float]]]
    ) -> None:
        """Record a measurement of ``step``. A run with a stop request skips it, and measures after its
        resume.
        """
        self._evaluation_pending = True
        if self._stop_requested():
            return
        self._recorder.phase(phase)
        metrics = await run_unless_stopped(measurement(), self._stop_requested)
        if metrics is not None:
            self._recorder.log(step, metrics)
            self._evaluation_pending = False
            self._compare_with_best(step, metrics)

    def _compare_with_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remember ``step`` if its `checkpoint.keep_best` is the highest so far. Not step 0: the initial
        weights have no checkpoint.
        """
        name = self._config.checkpoint.keep_best
        if name is None or step == 0:
            return
        if name not in metrics:
            self._recorder.warn(
                f"`checkpoint.keep_best` = {name}: the evaluation of step {step} has no such metric; it has "
                f"{', '.join(sorted(metrics))}"
            )
        elif math.isfinite(metrics[name]) and (self._best is None or metrics[name] > self._best[1]):
            self._best = (step, metrics[name])
            self._recorder.note(f"the checkpoint of step {step} is the best: {name} = {metrics[name]:.6g}")

    def ends_early(self, step: int) -> str:
        """Return why the run ends after ``step``; "": it goes on."""
        return ends_early(self._config, step, self._best)

    async def _save_where_due(self, step: int) -> None:
        """Save after ``step`` if due by steps, by time or as the best, or if a policy node is being drained.
        Raises Preempted after a stop request.
        """
        settings = self._config.checkpoint
        due = is_due(step, settings.every) or step == self._config.steps or self.ends_early(step) != ""
        due = due or (self._best is not None and self._best[0] == step)
        if settings.every_minutes is not None:
            elapsed_s = asyncio.get_running_loop().time() - self._saved_s
            due = due or elapsed_s >= 60 * settings.every_minutes
        if due or self._stop_requested() or self._node_leaves():
            await self._save(self._progress(step))
        if self._stop_requested():  # again: a request may have come while saving
            await self._end(step)

    def _node_leaves(self) -> bool:
        """Return whether a node began to drain since the last save."""
        return not self._left.issuperset(self._workers.leaving_nodes())

    async def _save(self, progress: Progress) -> None:
        """Save ``progress``, the state that fits the policy's weights. The caller takes it before any await:
        it would lack a batch that the loop receives meanwhile.
        """
        step, leaving = progress.step, self._workers.leaving_nodes()
        for node in sorted(leaving - self._left):
            self._recorder.warn(
                f"node {node} of the policy is drained: the state after step {step} is saved at once, and "
                "the run goes on until the node is lost"
            )
        self._left |= leaving
        self._recorder.phase("save")
        self._recorder.flush()
        self._saved_s = asyncio.get_running_loop().time()
        await self._checkpoints.save(step, self._workers, progress)
        self._saved_step = step

    def _progress(self, step: int) -> Progress:
        return replace(self._state(step, self._evaluation_pending), best=self._best)

    async def _end(self, step: int) -> NoReturn:
        await self._checkpoints.settle()
        self._recorder.phase("end")
        raise Preempted(f"stopped on request; step {step} saved; {RERUN}")


# New objects that trigger a garbage collection; Python's 700 are the objects of 70 samples.
_NEW_OBJECTS = 20_000


@dataclass(frozen=True, slots=True)
class StatefulParts:
    """The parts of the loop whose state a checkpoint keeps."""

    pipeline: Pipeline
    staging: Staging
    health: HealthWatch
    kl: KLController

    def progress(self, step: int, evaluation_pending: bool) -> Progress:
        """Return the state after ``step``."""
        return Progress(
            step,
            self.pipeline.state(),
            self.health.state,
            self.kl.coef,
            evaluation_pending,
            self.staging.rewards,
        )


class Chores(StepChores):
    """Does everything after an update that is not part of the algorithm.

    Args:
        parts: their state goes into checkpoints.
        evaluation: `evaluation.sampling.evaluate` with all its arguments but ``step``.
        stop_requested: true once the run is to save and end.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        recorder: Recorder,
        checkpoints: Checkpointer,
        parts: StatefulParts,
        evaluation: Callable[..., Coroutine[Any, Any, dict[str, float]]],
        stop_requested: Callable[[], bool],
    ) -> None:
        super().__init__(config, workers, recorder, checkpoints, parts.progress, stop_requested)
        self._parts, self._evaluation = parts, evaluation
        self._user_metrics = UserMetrics(
            config.tracking.metrics,
            config.code_paths,
            recorder.warn,
            limit_s=config.cluster.timeouts.user_code_s,
        )
        self._concurrent: ConcurrentEvaluation | None = None
        if workers.evaluation is not None:
            save_s = config.cluster.timeouts.save_s
            self._concurrent = ConcurrentEvaluation(workers.evaluation, evaluation, recorder, save_s=save_s)

    async def __aenter__(self) -> Chores:
        # Modules and data live as long as the loop, and a step's samples as long as the step. Full
        # collections would visit all of it several times a step: a quarter of this thread's time.
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(_NEW_OBJECTS, *self._thresholds[1:])
        return self

    async def __aexit__(self, *exc: object) -> None:
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()
        if self._concurrent is not None:
            await self._concurrent.cancel()

    async def before_first_step(self, progress: Progress) -> None:
        """Evaluate if a resumed run did not finish its last evaluation, or a new run begins with one."""
        self._evaluation_pending, self._saved_step = progress.evaluation_pending, progress.step
        self._best = progress.best
        step, due = progress.step, progress.evaluations
        if self._concurrent is not None:
            await self._concurrent.resume(step, due, self._stop_requested)
        elif skipped := [at for at in due if at != step]:
            self._recorder.warn(
                f"the evaluation of step {', '.join(map(str, skipped))} was not finished and is left out: "
                "`evaluation.num_workers` = 0, and those weights are gone"
            )
        pending = progress.evaluation_pending or (self._concurrent is None and step in due)
        first = step == 0 and self._config.evaluation.before and step not in due  # `resume` repeats those
        if pending or first:
            await self._evaluate(step)
        if self._concurrent is None and not self._evaluation_pending:
            await discard_snapshots(self._recorder.directory)

    async def after_last_step(self) -> None:
        """Wait for the evaluation that still runs, unless the run has a stop request."""
        if self._concurrent is not None:
            await self._concurrent.settle(self._stop_requested)

    async def after_step(
        self,
        step: int,
        staged: Staged,
        values: ValuesOfSamples | None,
        metrics: dict[str, float],
        timer: Stopwatch,
        *,
        trained: bool,
    ) -> None:
        """Record ``step``, then evaluate and save where due. Raises Unhealthy, Rollback or Preempted.

        Args:
            values: per-token values of the samples; None: samples are not recorded.
            metrics: of the step so far.
            timer: of the phases of the step.
            trained: updates were attempted.
        """
        config, health, batch = self._config, self._parts.health, staged.source
        if self._concurrent is not None:
            self._concurrent.check()
        metrics = metrics | await self._final_metrics(staged, batch.sampled, timer, metrics, trained=trained)
        metrics |= {**batch.metrics, **self._parts.pipeline.metrics}
        if config.tracking.metrics:  # in a thread: the loop keeps receiving and launching groups
            inputs = MetricInputs(step, batch.sampled, metrics)
            metrics |= await asyncio.to_thread(self._user_metrics, inputs)
        alarms, counts = health.examine(step, metrics)
        metrics |= counts
        usage = self._workers.usage
        self._recorder.spans(step, timer.spans, usage.latest if usage else {})
        self._recorder.samples(f"step_{step:06d}", batch.sampled, values)
        skipped = not trained or metrics[SKIPPED] > 0
        self._recorder.ledger(
            step,
            ledger_entry(
                batch.groups,
                batch.discarded,
                with_signal=staged.groups_with_signal,
                skipped=skipped,
                demonstrations=staged.demonstrations,
            ),
        )
        self._recorder.log(step, metrics)
        health.act(step, alarms, metrics, batch.groups)
        exported = step == config.steps and evaluates_export(config.evaluation, config.checkpoint)
        if is_due(step, config.evaluation.every) and not exported:
            await self._evaluate(step)
        await self._save_where_due(step)

    async def next_batch(self, step: int) -> ScoredBatch:
        """Wait for the batch after ``step``, and return it. If a policy node starts to drain meanwhile, save
        the state after ``step``: the samples may take longer than the notice.

            samples  | batch in flight .......................... |
            policy     notice: save; on shared GPUs it waits for them | update

        Raises Preempted after a stop request, also while it saves.
        """
        saving: asyncio.Task[None] | None = None

        def is_interrupted() -> bool:
            due = saving.done() if saving else step > self._saved_step and self._node_leaves()
            return due or self._stop_requested()

        try:
            while (batch := await self._parts.pipeline.next(unless=is_interrupted)) is None:
                if self._stop_requested():
                    await self._preempt(step, saving)
                elif saving is None:
                    state = self._progress(step)  # before the loop can receive the batch
                    saving = asyncio.create_task(self._save(state), name=f"save of step {step}")
                else:
                    saving.result()  # bounded: it is done
                    saving = None
                    self._recorder.phase("sample")
            if saving is not None:  # the update would change what it saves
                await saving
            return batch
        finally:
            if saving is not None:
                saving.cancel()
                await asyncio.gather(saving, return_exceptions=True)

    async def _preempt(self, step: int, saving: asyncio.Task[None] | None) -> NoReturn:
        """Save the state after ``step``, unless ``saving`` does so, and raise Preempted. First cancel the
        samples in flight: a colocated policy would wait for them.
        """
        await self._parts.pipeline.cancel()
        await (self._save(self._progress(step)) if saving is None else saving)
        await self._end(step)

    async def _save(self, progress: Progress) -> None:
        if self._concurrent is not None:
            await self._concurrent.keep(progress.step)
        await super()._save(progress)

    def _progress(self, step: int) -> Progress:
        due = self._concurrent.due if self._concurrent is not None else ()
        return replace(super()._progress(step), evaluations=due)

    async def _evaluate(self, step: int) -> None:
        if self._concurrent is not None:
            self._evaluation_pending = False
            await self._concurrent.begin(step, self._stop_requested)
            return
        await self._measure(step, "evaluate", partial(self._evaluation, step=step))


def evaluates_export(evaluation: EvaluationConfig, checkpoint: CheckpointConfig) -> bool:
    """Return whether the model after the last step is exported and evaluated."""
    return evaluation.after and checkpoint.export
