"""The loop of supervised training: cross-entropy on the completions of demonstrations.

    staging  | batch k+1 ..... |                   padding, rows dealt to ranks and put where they fetch them
    policy   | update on batch k ..... | update on batch k+1 ...
    driver                             record, validation loss, checkpoint

The batch of a step is a function of (seed, step), so resuming needs the step alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from grpo_dist.algorithms.schedules import is_due
from grpo_dist.batch.rows import batch_of
from grpo_dist.batch.shared_prefixes import needed_tokens
from grpo_dist.config import Config, SFTConfig
from grpo_dist.data.demonstrations import Demonstration
from grpo_dist.data.order import step_indices
from grpo_dist.health import HealthWatch
from grpo_dist.loop.chores import Checkpointer, StepChores
from grpo_dist.loop.progress import Progress
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.types import Group
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
) -> int:
    """Train from the step in ``progress`` to step ``config.steps``, and return it. Once ``stop_requested`` is
    true, save the current step and end.

    Raises what a worker raises; TimeoutError naming a stage of `cluster.timeouts`; Unhealthy and Rollback
    from `health`; Preempted after saving.
    """
    assert config.sft is not None  # the configuration was checked
    progress = progress or Progress()
    health = HealthWatch(config, recorder, progress.health)
    stage = partial(_stage, config.sft, workers.policy, demonstrations)

    def begin(step: int) -> asyncio.Task[_Staged]:
        return asyncio.create_task(asyncio.to_thread(stage, step), name=f"stage {step}")

    chores = _Chores(config, workers, held_out, recorder, checkpoints, health, stop_requested)
    if progress.step == 0 or progress.evaluation_pending:
        await chores.validate(progress.step)
    ahead = begin(progress.step)
    try:
        for step in range(progress.step, config.steps):
            timer = Stopwatch(recorder.phase)
            with timer("stage"):
                staged = await ahead  # bounded: it computes
            if step + 1 < config.steps:
                ahead = begin(step + 1)
            trained, metrics = health.judge_batch(step + 1, staged.groups, {})
            with timer("update"):
                if trained:
                    await chores.before_update(step + 1)
                    bounds = health.update_bounds()
                    metrics |= await workers.policy.update(staged.update, kl_coef=0.0, bounds=bounds)
                    health.after_update(step + 1, metrics, staged.groups)
            await chores.after_step(step + 1, staged, metrics, timer, trained=trained)
    finally:
        ahead.cancel()
    await checkpoints.settle()
    recorder.phase("end")
    return config.steps


@dataclass(frozen=True, slots=True)
class _Staged:
    update: StagedRef
    groups: list[Group]
    tokens: int  # in all rows
    needed_tokens: float  # tokens with shared beginnings of demonstrations counted once
    loss_tokens: int  # tokens in the loss
    epoch: float  # passes over the demonstrations, including this step

    @property
    def rows(self) -> int:
        return len(self.groups)


def _stage(
    settings: SFTConfig, policy: PolicyHandle, demonstrations: Sequence[Demonstration], step: int
) -> _Staged:
    """Make the batch of a step and stage it."""
    count = len(demonstrations)
    chosen = step_indices(count, settings.batch_size, settings.seed, step)
    groups = [demonstrations[i].to_group() for i in chosen]
    batch = batch_of(groups, settings.max_length)
    epoch = (step + 1) * settings.batch_size / count
    update = policy.stage([batch], keep_logprobs=False)
    tokens, trained = int(batch.lengths.sum()), round(batch.denominators.tokens)
    return _Staged(update, groups, tokens, needed_tokens([batch]), trained, epoch)


class _Chores(StepChores):
    """Does everything after an update that is not part of training."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        held_out: Sequence[Demonstration],
        recorder: Recorder,
        checkpoints: Checkpointer,
        health: HealthWatch,
        stop_requested: Callable[[], bool],
    ) -> None:
        def state(step: int, evaluation_pending: bool) -> Progress:
            return Progress(step, health=health.state, evaluation_pending=evaluation_pending)

        assert config.sft is not None  # the configuration was checked
        super().__init__(config, workers, recorder, checkpoints, state, stop_requested)
        self._settings, self._held_out, self._health = config.sft, held_out, health

    async def after_step(
        self, step: int, staged: _Staged, metrics: dict[str, float], timer: Stopwatch, *, trained: bool
    ) -> None:
        """Record ``step``, then validate and save where due. Raises Unhealthy, Rollback or Preempted."""
        usage, health = self._workers.usage, self._health
        metrics = metrics | await self._final_metrics(staged, staged.groups, timer, metrics, trained=trained)
        metrics["train/epoch"] = staged.epoch
        alarms, counts = health.examine(step, metrics)
        metrics |= counts
        self._recorder.spans(step, timer.spans, usage.latest if usage else {})
        self._recorder.log(step, metrics)
        health.act(step, alarms, metrics, staged.groups)
        if step == self._config.steps or is_due(step, self._settings.validate_every):
            await self.validate(step)
        await self._save_where_due(step)

    async def validate(self, step: int) -> None:
        """Record the loss of the held-out demonstrations, if there are any."""
        if self._held_out:
            await self._measure(step, "validate", self._validation)

    async def _validation(self) -> dict[str, float]:
        loss = await validation_loss(self._workers.policy, self._held_out, self._settings)
        return {"validation/loss": loss}


async def validation_loss(
    policy: PolicyHandle, held_out: Sequence[Demonstration], settings: SFTConfig
) -> float:
    """Return the mean of -log p over all tokens of the completions, in nats, summed in float64."""
    total, tokens = 0.0, 0
    for first in range(0, len(held_out), settings.batch_size):
        groups = [row.to_group() for row in held_out[first : first + settings.batch_size]]
        _, rows = await policy.logprobs(batch_of(groups, settings.max_length))
        total -= sum(float(values.sum(dtype=np.float64)) for _, values in sorted(rows.items()))
        tokens += sum(map(len, rows.values()))
    return total / tokens
