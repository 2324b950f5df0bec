"""The real driver loop on simulated workers and a simulated clock.

    driver.run, pipeline, load balancer, staging, health, recovery    as in production
    workers                                                           wait as long as `Rates` say

The processor time of the driver's own code is measured, without that of the simulated workers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from grpo_dist import driver
from grpo_dist.config import Config
from grpo_dist.data.order import OrderState
from grpo_dist.errors import RERUN
from grpo_dist.loop.progress import PipelineState, Progress
from grpo_dist.runs.recovery import Recovery
from grpo_dist.runs.resume import ResumePoint
from grpo_dist.runtime.metering import Span
from grpo_dist.tools.bench.figures import covered_s
from grpo_dist.tools.plan import fake_records
from grpo_dist.tools.plan.failures import InMemoryCheckpoints
from grpo_dist.tools.plan.scenario import Scenario, as_planned
from grpo_dist.tools.plan.simulated_cluster import SimulatedCluster
from grpo_dist.tools.plan.step_recorder import StepRecorder
from grpo_dist.tools.plan.virtual_clock import run_virtually


@dataclass(frozen=True)
class Simulated:
    """Means over the timed steps; a step's seconds and tokens are per step.

    ``stage_s``: seconds in which at least one worker is in a stage. ``idle``: share of the time in which the
    engines, and the policy, have nothing to do; ``engines_idle``: of each engine. ``tokens``: of prompts and
    completions, including those that dynamic sampling discards. ``length_bias``: after the last step, NaN
    without `batch.order` finished. ``sequences``: decoded at once by a busy
    engine. ``queue``: most groups that waited for an engine. ``driver_cpu_s``: processor seconds per step,
    without Ray and the records' real sizes. ``bars``: the spans of each worker since the run began. ``ends``:
    times at which its steps ended, of which ``timed`` count.
    """

    step_s: float
    stage_s: dict[str, float]
    idle: dict[str, float]
    engines_idle: list[float]
    tokens: float
    completion_tokens: float
    samples: float
    sequences: float
    longest_batch_s: float
    longest_update_s: float
    queue: int
    failed_engines: int
    rank_restarts: int
    staleness: float
    length_bias: float
    driver_cpu_s: float
    bars: dict[str, list[Span]]
    ends: list[float]
    timed: slice

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def completion_tokens_per_s(self) -> float:
        return self.completion_tokens / self.step_s


def simulate(scenario: Scenario) -> Simulated:
    """Run a few steps of the loop, as a benchmark does."""
    config = as_planned(scenario)
    begin = time.process_time()
    cluster, recorder = run_virtually(lambda: _run(scenario, config))
    spent = time.process_time() - begin
    first = scenario.warmup_steps + config.max_staleness
    return _measured(cluster, recorder, slice(first, first + scenario.steps), spent)


async def _run(scenario: Scenario, config: Config) -> tuple[SimulatedCluster, StepRecorder]:
    """Run the loop to its last step, with as many restarts as it takes."""
    cluster = SimulatedCluster(scenario, config)
    recorder, checkpoints = StepRecorder(cluster.trace), InMemoryCheckpoints()
    # Dynamic sampling discards prompts, and slow groups keep theirs: enough for all that are on their way.
    spare = config.dynamic_sampling.enabled or config.batch.order == "finished"
    batches = max(4 * (config.max_staleness + 1) if spare else 1, scenario.epoch_steps)
    if config.data.order == "length":
        batches = max(batches, config.data.length_window or 8)
    prompts = fake_records.prompts(batches * config.batch.prompts_per_step, scenario.workload.prompt_tokens)
    begin = ResumePoint()
    if config.data.order == "length" and scenario.lengths_known:  # by an epoch before
        known = scenario.workload.known_lengths([p.uid for p in prompts], config.batch.samples_per_prompt)
        begin = ResumePoint(progress=Progress(pipeline=PipelineState(order=OrderState(lengths=known))))

    recovery = Recovery(
        config.cluster,
        cluster,
        recorder,
        checkpoints.newest,
        recorder.directory,
        first=begin,
        start=cluster.begin,
        remedy=RERUN,
    )
    try:
        async for attempt in recovery.attempts():
            async with attempt as (point, workers):
                cluster.rollouts.version = point.step
                await driver.run(config, workers, prompts, [], recorder, checkpoints, point.progress)
        return cluster, recorder
    finally:
        cluster.failures.stop()


def _measured(cluster: SimulatedCluster, recorder: StepRecorder, timed: slice, spent: float) -> Simulated:
    bars, rollouts, failures = cluster.trace.bars, cluster.rollouts, cluster.failures
    ends = [0.0, *(step.end for step in recorder.steps)]
    steps = recorder.steps[timed]
    begin, end = ends[timed.start], steps[-1].end
    seconds, count = end - begin, len(steps)

    def busy(stage: str) -> float:
        return covered_s((s for own in bars.values() for s in own if s.stage == stage), begin, end)

    stages = ("sample", "reward_model", "score", "logprobs", "update", "sync", "turn")
    engines = [name for name in bars if name.startswith("rollout")]
    sampling = [covered_s((s for s in bars[name] if s.stage == "sample"), begin, end) for name in engines]
    policy = [s for s in bars["policy"] if s.stage in ("update", "sync")]
    return Simulated(
        step_s=seconds / count,
        stage_s={stage: busy(stage) / count for stage in stages if busy(stage)},
        idle={
            "rollout": 1.0 - sum(sampling) / len(engines) / seconds,
            "policy": 1.0 - covered_s(policy, begin, end) / seconds,
        },
        engines_idle=[1.0 - own / seconds for own in sampling],
        tokens=sum(s.tokens for s in steps) / count,
        completion_tokens=sum(s.completion_tokens for s in steps) / count,
        samples=sum(s.samples for s in steps) / count,
        sequences=rollouts.sequences,
        longest_batch_s=max(rollouts.batch_s),
        longest_update_s=max(s.end - s.begin for s in bars["policy"] if s.stage == "update"),
        queue=rollouts.longest_queue,
        failed_engines=failures.failed_engines,
        rank_restarts=failures.rank_restarts,
        staleness=sum(s.staleness for s in steps) / count,
        length_bias=steps[-1].length_bias,
        driver_cpu_s=max(0.0, spent - cluster.trace.excluded_s) / recorder.logged,
        bars=bars,
        ends=ends[1:],
        timed=timed,
    )
