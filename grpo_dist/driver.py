"""The loop: sample -> reward -> advantage -> update -> sync.

What runs at once, with ``max_staleness`` n (0: the columns take turns; 1: sampling batch k+1 hides behind
training on k):

    rollouts   | sample k+n ............ |        | sample k+n+1 ...
    rewards    |    score each group as it ends   |
    reference  |    log-probs of the same groups  |
    policy     | update on batch k ...... | send  | update on batch k+1 ...
    driver       launch, wait for batch k   sync    log, evaluate, checkpoint

The workers come as an argument, so this very loop runs in unit tests on fakes. Nothing here knows about Ray.
"""

from __future__ import annotations

from typing import Protocol

from grpo_dist.batching import compute_advantages, make_batch, split_updates
from grpo_dist.config import Config
from grpo_dist.control import shuffle_rewards
from grpo_dist.evaluate import EvalSet, evaluate
from grpo_dist.metrics import Stopwatch, rollout_metrics, throughput_metrics
from grpo_dist.pipeline import Pipeline, ScoredGroup
from grpo_dist.seeds import derived_seed
from grpo_dist.types import Group, Prompt, TrainBatch
from grpo_dist.workers import Workers


class Recorder(Protocol):
    """Where a run writes what it saw: `tracking.Tracker` in production."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def samples(self, name: str, groups: list[Group]) -> None: ...


class Checkpointer(Protocol):
    """`checkpoint.Checkpoints` in production."""

    async def save(self, step: int, workers: Workers, ahead: dict[int, list[Group]]) -> None: ...


async def run(
    config: Config,
    workers: Workers,
    prompts: list[Prompt],
    eval_sets: list[EvalSet],
    recorder: Recorder,
    checkpoints: Checkpointer,
    *,
    start: int = 0,
    ahead: dict[int, list[Group]] | None = None,
) -> None:
    """Train from step ``start`` to ``config.steps``; the engines hold version ``start`` when this begins.

    ``ahead`` holds finished groups of later batches that a checkpoint kept. Raises what a worker raises, and
    TimeoutError naming the stage when a deadline of `cluster.timeouts` passes.
    """
    pipeline = Pipeline(config, workers, prompts, first=start, finished=ahead or {})
    if start == 0 and config.evaluation.before:
        recorder.log(0, await evaluate(config, workers, eval_sets, recorder, step=0))
    for step in range(start, config.steps):
        watch = Stopwatch()
        pipeline.launch(through=min(step + config.max_staleness, config.steps - 1))
        with watch("sample"):
            scored = await pipeline.next()
        groups = [s.group for s in scored]
        with watch("update"):
            metrics = await workers.policy.update(make_batches(config, scored, step))
        with watch("drain"):
            await pipeline.settle()
        with watch("sync"):
            await workers.sync.push(version=step + 1)
        metrics |= rollout_metrics(groups, version=step, max_new_tokens=config.sampling.max_new_tokens)
        metrics |= throughput_metrics(groups, watch.stop())
        recorder.samples(f"step_{step + 1:06d}", groups)
        recorder.log(step + 1, metrics)
        if is_due(step + 1, config.evaluation.every) and not is_last_of_all(config, step + 1):
            recorder.log(step + 1, await evaluate(config, workers, eval_sets, recorder, step=step + 1))
        if is_due(step + 1, config.checkpoint.every) or step + 1 == config.steps:
            await checkpoints.save(step + 1, workers, pipeline.finished_ahead())


def make_batches(config: Config, scored: list[ScoredGroup], step: int) -> list[TrainBatch]:
    """One TrainBatch per optimiser update of the step. Advantages see the whole step before it is split."""
    algorithm = config.algorithm
    groups = [s.group for s in scored]
    if config.rewards.shuffle:
        groups = shuffle_rewards(groups, derived_seed(config.seed, f"shuffle rewards of step {step}"))
    advantages = compute_advantages(
        groups, algorithm.advantage, std=algorithm.std, eps=algorithm.advantage_eps
    )
    ref_logprobs = [row for s in scored for row in s.ref_logprobs] if config.needs_reference else None
    batch = make_batch(
        groups, advantages, ref_logprobs=ref_logprobs, max_new_tokens=config.sampling.max_new_tokens
    )
    return split_updates(batch, num_groups=len(groups), num_updates=config.batch.updates_per_step)


def is_last_of_all(config: Config, step: int) -> bool:
    """Whether the exported model is evaluated right after this step anyway."""
    return step == config.steps and config.evaluation.after and config.checkpoint.export


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
