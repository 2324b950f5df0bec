"""The loop: sample -> reward -> advantage -> update -> sync.

What runs at the same time, with ``max_staleness`` n (0: one column after the other; 1: sampling batch k+1
hides behind training on k):

    rollouts   | sample k+n ............ |        | sample k+n+1 ...
    rewards    |    score each group as it ends   |
    reference  |    log-probs of the same groups  |
    policy     | update on batch k ...... | send  | update on batch k+1 ...
    staging    |       | make batch k+1 ready |    |
    driver       launch, wait for batch k   sync    log, evaluate, checkpoint

The workers are an argument, so unit tests run this very loop on fakes. Nothing here knows about Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from grpo_dist.config import Config
from grpo_dist.evaluation.sampling import EvalSet, evaluate
from grpo_dist.health import HealthWatch
from grpo_dist.loop.chores import Checkpointer, Chores, StatefulParts
from grpo_dist.loop.first_come import PIPELINES
from grpo_dist.loop.pipeline import Pipeline, publish
from grpo_dist.loop.progress import Progress
from grpo_dist.loop.sampling_schedule import KLController
from grpo_dist.loop.staging import Staging, recorded_values
from grpo_dist.loop.sync_probe import SyncProbe
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.types import Prompt
from grpo_dist.workers import Workers

if TYPE_CHECKING:  # imports the chat templates
    from grpo_dist.data.demonstrations import Demonstration


async def run(
    config: Config,
    workers: Workers,
    prompts: Sequence[Prompt],
    eval_sets: list[EvalSet],
    recorder: Recorder,
    checkpoints: Checkpointer,
    progress: Progress | None = None,
    *,
    demonstrations: Sequence[Demonstration] = (),
    stop_requested: Callable[[], bool] = lambda: False,
    pipelines: Mapping[str, type[Pipeline]] = PIPELINES,
    make_staging: type[Staging] = Staging,
) -> int:
    """Train from the step in ``progress``, whose weights the engines hold on entry, to step ``config.steps``.
    Returns the last step, which is earlier where `checkpoint.patience` or `checkpoint.target` ends the run.

    ``demonstrations``: the rows of `config.demonstrations`, for the cross-entropy in every update. Once
    ``stop_requested`` is true, the run saves the current step and ends; if samples are still missing, it
    saves the step before, with the finished groups. A simulation replaces ``pipelines`` and ``make_staging``.

    Raises what a worker raises; TimeoutError naming a stage of `cluster.timeouts`; Unhealthy and Rollback
    from `health`; Preempted after saving.
    """
    progress = progress or Progress()
    pipeline = pipelines[config.batch.order.name](config, workers, prompts, progress.step, progress.pipeline)
    staging = make_staging(config, workers.policy, progress.rewards, demonstrations)
    probe = SyncProbe(config, workers, prompts, recorder, start=progress.step)
    health = HealthWatch(config, recorder, progress.health)
    kl = KLController(config.algorithm.kl, progress.kl_coef)
    parts = StatefulParts(pipeline, staging, health, kl)
    engines = workers.evaluation or workers
    evaluation = partial(evaluate, config, engines, eval_sets, recorder, explain=workers.where_stuck)
    chores = Chores(config, workers, recorder, checkpoints, parts, evaluation, stop_requested)
    async with pipeline, probe, chores:
        await chores.before_first_step(progress)
        for step in range(progress.step, config.steps):
            if reason := chores.ends_early(step):
                recorder.note(f"the run ends after step {step} of {config.steps}: {reason}")
                break
            timer = Stopwatch(recorder.phase)
            probe.begin(step)
            await pipeline.launch(through=min(step + config.max_staleness, config.steps - 1))
            with timer("sample"):
                batch = await chores.next_batch(step)
            with timer("stage"):
                staged = await staging.take(step, batch, kl_coef=kl.coef)
            staging.begin(step + 1, pipeline.oldest)
            metrics = staged.metrics | await probe.finish(step, timer)
            trainable, metrics = health.judge_batch(step + 1, batch.groups, metrics)
            with timer("update"):
                if trainable:
                    await chores.before_update(step + 1)
                    bounds = health.update_bounds()
                    metrics |= await workers.policy.update(staged.updates, kl_coef=kl.coef, bounds=bounds)
                    probe.after_update(step, metrics)
                    health.after_update(step + 1, metrics, batch.groups)
                values = await recorded_values(staged, workers.policy, trained=trainable)
            metrics |= await publish(step + 1, config.reference, workers, pipeline, timer, stop_requested)
            metrics |= kl.observe(metrics)
            await chores.after_step(step + 1, staged, values, metrics, timer, trained=trainable)
        else:
            step = config.steps
        await chores.after_last_step()
        await checkpoints.settle()
        recorder.phase("end")
    return step
