"""The loop: sample -> reward -> advantage -> update -> sync.

What runs at once, with ``max_staleness`` n (0: the columns take turns; 1: sampling batch k+1 hides behind
training on k):

    rollouts   | sample k+n ............ |        | sample k+n+1 ...
    rewards    |    score each group as it ends   |
    reference  |    log-probs of the same groups  |
    policy     | update on batch k ...... | send  | update on batch k+1 ...
    staging    |       | make batch k+1 ready |    |
    driver       launch, wait for batch k   sync    log, evaluate, checkpoint

The workers come as an argument, so this very loop runs in unit tests on fakes. Nothing here knows about Ray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from grpo_dist.algorithms.kl_control import next_kl_coef
from grpo_dist.algorithms.schedules import is_due
from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.config import Config, KLConfig
from grpo_dist.errors import Preempted
from grpo_dist.evaluation.sampling import EvalSet, evaluate
from grpo_dist.health.watch import SKIPPED, HealthWatch
from grpo_dist.loop.ledger import Account, account
from grpo_dist.loop.metrics import rollout_metrics, throughput_metrics
from grpo_dist.loop.pipeline import Pipeline
from grpo_dist.loop.progress import Progress
from grpo_dist.loop.staging import Staging, recorded_values
from grpo_dist.loop.sync_probe import SyncProbe
from grpo_dist.runtime.concurrency import unless_asked
from grpo_dist.runtime.metering import Span, Stopwatch, Usage
from grpo_dist.types import Group, Prompt
from grpo_dist.workers import Workers


class Recorder(Protocol):
    """Where a run writes what it saw: `tracking.Tracker` in production."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None: ...
    def spans(self, step: int, own: Sequence[Span], workers: Mapping[str, Usage]) -> None: ...
    def account(self, step: int, found: Account) -> None: ...
    def aside(self, step: int, groups: list[Group]) -> str: ...
    def warn(self, message: str) -> None: ...
    def note(self, message: str) -> None: ...
    def flush(self) -> None: ...
    def phase(self, name: str) -> None: ...
    @property
    def directory(self) -> Path: ...


class Checkpointer(Protocol):
    """`checkpoint.Checkpoints` in production: writes beside the loop; `settle` waits for it."""

    async def save(self, step: int, workers: Workers, progress: Progress) -> None: ...
    async def settle(self) -> None: ...


async def run(
    config: Config,
    workers: Workers,
    prompts: list[Prompt],
    eval_sets: list[EvalSet],
    recorder: Recorder,
    checkpoints: Checkpointer,
    *,
    start: int = 0,
    progress: Progress | None = None,
    asked_to_end: Callable[[], bool] = lambda: False,
) -> None:
    """Train from step ``start`` to ``config.steps``; the engines hold version ``start`` when this begins.

    ``progress`` is what a checkpoint kept of the run so far. Raises what a worker raises,
    TimeoutError naming the stage when a deadline of `cluster.timeouts` passes, Unhealthy when `health` says
    stop, and Preempted after a checkpoint where ``asked_to_end`` is true: of the step at its end, or, while a
    step is still sampled, of the one before, with the groups that are finished.
    """
    progress = progress or Progress()
    pipeline = Pipeline(config, workers, prompts, first=start, progress=progress)
    staging = Staging(config, workers.policy, progress.rewards)
    probe = SyncProbe(config, workers, prompts, recorder, start=start)
    health = HealthWatch(config, recorder, progress.health)
    kl = config.algorithm.kl
    kl_coef = kl.coef if progress.kl_coef is None else progress.kl_coef

    unassessed = progress.unassessed

    async def save(step: int) -> None:
        recorder.phase("save")
        recorder.flush()
        known = pipeline.progress(
            kl_coef=kl_coef, health=health.state, unassessed=unassessed, rewards=staging.rewards
        )
        await checkpoints.save(step, workers, known)

    async def assess(step: int) -> None:
        """Whoever is asked to end has no time for it: it comes when the run goes on."""
        nonlocal unassessed
        unassessed = True
        if not asked_to_end():
            recorder.phase("evaluate")
            stuck = workers.where_stuck
            work = evaluate(config, workers, eval_sets, recorder, step=step, explain=stuck)
            if (found := await unless_asked(work, asked_to_end)) is not None:
                recorder.log(step, found)
                unassessed = False

    async def end(step: int) -> NoReturn:
        await checkpoints.settle()
        raise Preempted(f"ended as asked after step {step}, saved; the same command goes on from it")

    async with pipeline, probe:
        if unassessed or (start == 0 and config.evaluation.before):
            await assess(start)
        for step in range(start, config.steps):
            watch = Stopwatch(recorder.phase)
            probe.begin(step)
            pipeline.launch(through=min(step + config.max_staleness, config.steps - 1))
            with watch("sample"):
                batch = await pipeline.next(unless=asked_to_end)
            if batch is None:  # asked to end
                await save(step)
                await end(step)
            with watch("stage"):
                staged = await staging.take(step, batch, kl_coef=kl_coef)
            staging.begin(step + 1, pipeline.oldest)
            sampled = batch.sampled.sampled
            metrics = rollout_metrics(sampled, version=step, max_new_tokens=config.sampling.max_new_tokens)
            metrics |= await probe.finish(step, watch)
            teaches = health.teaches(step + 1, batch.sampled.groups, metrics)
            with watch("update"):
                if teaches:
                    if step + 1 in config.profile.steps:
                        await workers.policy.trace_next(recorder.directory, step + 1)
                    metrics |= await workers.policy.update(
                        staged.updates, kl_coef=kl_coef, bounds=health.bounds_of_update()
                    )
                    probe.after_update(step, metrics)
                    health.after_update(step + 1, metrics, batch.sampled.groups)
                values = await recorded_values(staged, workers.policy, trained=teaches)
            renews = workers.reference_sync and is_due(step + 1, config.reference.refresh_every)
            with watch("drain"):  # whoever is asked to end needs no new weights, but for the reference
                settled = await (pipeline.settle() if renews else pipeline.settle(unless=asked_to_end))
            with watch("sync"):
                metrics |= await workers.sync.push(version=step + 1) if settled else {}
            if workers.reference_sync and renews:
                with watch("reference"):
                    await pipeline.renew_reference(workers.reference_sync.refresh)
            if workers.usage:
                metrics |= await workers.usage.read()
            metrics |= throughput_metrics(sampled, watch.stop())
            metrics |= {"ref/kl_coef": kl_coef, "group/extra_prompts": float(len(batch.discarded))}
            metrics |= (
                {"train/rows": float(staged.rows), "train/tokens": float(staged.tokens)} if teaches else {}
            )
            kl_coef = steered(kl_coef, kl, metrics.get("ref/kl"))
            metrics["train/loss_tokens"] = float(staged.loss_tokens if teaches else 0)
            alarms = health.examine(step + 1, metrics)
            recorder.spans(step + 1, watch.spans, workers.usage.latest if workers.usage else {})
            recorder.samples(f"step_{step + 1:06d}", sampled, values)
            skipped = not teaches or metrics[SKIPPED] > 0
            books = account(batch.sampled.groups, batch.discarded, taught=staged.taught, skipped=skipped)
            recorder.account(step + 1, books)
            recorder.log(step + 1, metrics)
            health.act(step + 1, alarms, metrics, batch.sampled.groups)
            if is_due(step + 1, config.evaluation.every) and not is_last_of_all(config, step + 1):
                await assess(step + 1)
            if is_due(step + 1, config.checkpoint.every) or step + 1 == config.steps or asked_to_end():
                await save(step + 1)
            if asked_to_end():  # also when it was while saving
                await end(step + 1)
        await checkpoints.settle()


def steered(kl_coef: float, kl: KLConfig, observed: float | None) -> float:
    """The KL term's next weight; the same where nothing was trained, or with a KL that is not a number."""
    if kl.target is None or observed is None or not math.isfinite(observed):
        return kl_coef
    return next_kl_coef(kl_coef, observed, target=kl.target, gain=kl.gain)


def is_last_of_all(config: Config, step: int) -> bool:
    """Whether the exported model is evaluated right after this step anyway."""
    return step == config.steps and config.evaluation.after and config.checkpoint.export
