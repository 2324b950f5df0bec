"""The loop of supervised training: cross-entropy on the completions of demonstrations.

    staging  | batch k+1 ..... |                   padding, rows dealt to ranks and put where they fetch them
    policy   | update on batch k ..... | update on batch k+1 ...
    driver                             record, validation loss, checkpoint

The batch of a step is a function of (seed, step), so resuming needs the step alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_dist.algorithms.schedules import is_due
from grpo_dist.batch.rows import make_batch
from grpo_dist.config import Config, SFTConfig
from grpo_dist.data.demonstrations import Demonstration
from grpo_dist.data.order import shuffled
from grpo_dist.errors import RERUN, Preempted
from grpo_dist.health.watch import TRAINED_TOKENS, HealthWatch
from grpo_dist.loop.chores import Checkpointer
from grpo_dist.loop.metrics import throughput_metrics
from grpo_dist.loop.progress import Progress
from grpo_dist.runtime.concurrency import unless_stopped
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.types import Group, TrainBatch
from grpo_dist.workers import PolicyHandle, StagedRef, Workers


async def run(
    config: Config,
    workers: Workers,
    demonstrations: Sequence[Demonstration],
    held_out: Sequence[Demonstration],
    recorder: Recorder,
    checkpoints: Checkpointer,
    progress: Progress | None = None,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> None:
    """Train to step ``config.steps``, from that of ``progress``. Once ``stop_requested`` is true, save the
    current step and end.

    Raises what a worker raises; TimeoutError naming a stage of `cluster.timeouts`; Unhealthy and Rollback
    from `health`; Preempted once it is saved.
    """
    assert config.sft is not None  # the configuration was checked
    progress = progress or Progress()
    health = HealthWatch(config, recorder, progress.health)
    batches = _Batches(config.sft, workers.policy, demonstrations)
    chores = _Chores(config, workers, held_out, recorder, checkpoints, stop_requested)
    if progress.step == 0 or progress.evaluation_pending:
        await chores.validate(progress.step)
    ahead = batches.begin(progress.step)
    try:
        for step in range(progress.step, config.steps):
            timer = Stopwatch(recorder.phase)
            with timer("stage"):
                staged = await ahead  # bounded: it computes
            if step + 1 < config.steps:
                ahead = batches.begin(step + 1)
            trained, metrics = health.judge_batch(step + 1, staged.groups, {})
            with timer("update"):
                if trained:
                    if step + 1 in config.profile.steps:
                        await workers.policy.trace_next(recorder.directory, step + 1)
                    bounds = health.update_bounds()
                    metrics |= await workers.policy.update(staged.update, kl_coef=0.0, bounds=bounds)
                    health.after_update(step + 1, metrics, staged.groups)
            await chores.after_step(step + 1, staged, metrics, timer, health, trained=trained)
    finally:
        ahead.cancel()
    await checkpoints.settle()


@dataclass(frozen=True, slots=True)
class _Staged:
    update: StagedRef
    groups: list[Group]
    tokens: int  # of all rows
    loss_tokens: int  # of these tokens, those in the loss
    epoch: float  # passes over the demonstrations, with this step


class _Batches:
    """Makes the batch of a step and stages it in the background."""

    def __init__(
        self, settings: SFTConfig, policy: PolicyHandle, demonstrations: Sequence[Demonstration]
    ) -> None:
        self._settings, self._policy, self._demonstrations = settings, policy, demonstrations

    def begin(self, step: int) -> asyncio.Task[_Staged]:
        return asyncio.create_task(asyncio.to_thread(self._stage, step), name=f"stage {step}")

    def _stage(self, step: int) -> _Staged:
        settings, count = self._settings, len(self._demonstrations)
        chosen = step_indices(count, settings.batch_size, settings.seed, step)
        groups = [self._demonstrations[i].as_group() for i in chosen]
        batch = batch_of(groups, settings.max_length)
        epoch = (step + 1) * settings.batch_size / count
        update = self._policy.stage([batch], keep_logprobs=False)
        return _Staged(update, groups, int(batch.lengths.sum()), round(batch.num_tokens), epoch)


def step_indices(count: int, per_step: int, seed: int, step: int) -> Iterator[int]:
    """Yield the ``per_step`` demonstrations, 0..count-1, of ``step``: epochs, each a permutation drawn from
    the seed, without gaps between them.
    """
    for index in range(step * per_step, (step + 1) * per_step):
        epoch, at = divmod(index, count)
        yield int(shuffled(count, seed, epoch)[at])


def batch_of(groups: Sequence[Group], max_length: int) -> TrainBatch:
    """Make the batch of an update: a row for each demonstration, and the tokens of all completions as
    denominator.
    """
    ones = [np.ones(1, np.float32)] * len(groups)
    return make_batch(groups, ones, ref_logprobs=None, max_new_tokens=max_length)


class _Chores:
    """Does after each update what training itself does not need."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        held_out: Sequence[Demonstration],
        recorder: Recorder,
        checkpoints: Checkpointer,
        stop_requested: Callable[[], bool],
    ) -> None:
        assert config.sft is not None
        self._config, self._settings, self._workers = config, config.sft, workers
        self._held_out, self._recorder, self._checkpoints = held_out, recorder, checkpoints
        self._stop_requested, self._pending = stop_requested, False

    async def after_step(
        self,
        step: int,
        staged: _Staged,
        metrics: dict[str, float],
        timer: Stopwatch,
        health: HealthWatch,
        *,
        trained: bool,
    ) -> None:
        """Record ``step``, then validate and save where due. Raises Unhealthy, Rollback or Preempted."""
        config, usage = self._config, self._workers.usage
        metrics = metrics | (await usage.read() if usage else {})
        metrics |= throughput_metrics(staged.groups, timer.stop())
        metrics["train/epoch"] = staged.epoch
        if trained:
            metrics |= {"train/rows": float(len(staged.groups)), "train/tokens": float(staged.tokens)}
        metrics[TRAINED_TOKENS] = float(staged.loss_tokens if trained else 0)
        alarms, counts = health.examine(step, metrics)
        metrics |= counts
        self._recorder.spans(step, timer.spans, usage.latest if usage else {})
        self._recorder.log(step, metrics)
        health.act(step, alarms, metrics, staged.groups)
        last = step == config.steps
        if last or is_due(step, self._settings.validate_every):
            await self.validate(step)
        if last or is_due(step, config.checkpoint.every) or self._stop_requested():
            self._recorder.phase("save")
            self._recorder.flush()
            progress = Progress(step, health=health.state, evaluation_pending=self._pending)
            await self._checkpoints.save(step, self._workers, progress)
        if self._stop_requested():
            await self._checkpoints.settle()
            raise Preempted(f"ended as asked after step {step}, saved; {RERUN}")

    async def validate(self, step: int) -> None:
        """Record the loss of the held-out demonstrations, if there are any. In a run that is asked to end it
        waits for the resume.
        """
        if not self._held_out:
            return
        self._pending = True
        if self._stop_requested():
            return
        self._recorder.phase("validate")
        policy, settings = self._workers.policy, self._settings
        found = await unless_stopped(validation_loss(policy, self._held_out, settings), self._stop_requested)
        if found is not None:
            self._recorder.log(step, {"validation/loss": found})
            self._pending = False


async def validation_loss(
    policy: PolicyHandle, held_out: Sequence[Demonstration], settings: SFTConfig
) -> float:
    """Return the mean of -log p over all tokens of the completions, in nats, summed in float64."""
    total, tokens = 0.0, 0
    for first in range(0, len(held_out), settings.batch_size):
        groups = [row.as_group() for row in held_out[first : first + settings.batch_size]]
        _, rows = await policy.logprobs(batch_of(groups, settings.max_length))
        total -= sum(float(values.sum(dtype=np.float64)) for _, values in sorted(rows.items()))
        tokens += sum(map(len, rows.values()))
    return total / tokens
