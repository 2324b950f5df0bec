"""The real driver loop on simulated workers and a simulated clock.

    driver.run, pipeline, load balancer, staging, health    as in production
    workers                                                 wait as long as `Rates` say

The processor time of the driver's own code is measured, without that of the simulated workers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_dist import driver
from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.config import Config
from grpo_dist.data.order import OrderState
from grpo_dist.evaluation.sampling import EvalSet, evaluate
from grpo_dist.loop.progress import PipelineState, Progress
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.runtime.recorder import LedgerEntry
from grpo_dist.tools.bench.figures import covered_s
from grpo_dist.tools.plan import fake_records
from grpo_dist.tools.plan.scenario import Scenario, as_planned
from grpo_dist.tools.plan.simulated_cluster import SimulatedCluster, SimulationTrace
from grpo_dist.tools.plan.virtual_clock import run_virtually
from grpo_dist.types import Group
from grpo_dist.workers import Workers


@dataclass(frozen=True)
class Simulated:
    """Means over the timed steps; a step's seconds and tokens are per step.

    ``stage_s``: seconds in which at least one worker is in a stage. ``idle``: share of the time in which the
    engines, and the policy, have nothing to do. ``tokens``: of prompts and completions, including those that
    dynamic sampling discards. ``length_bias``: after the last step, NaN without `batch.order` completion.
    ``sequences``: decoded at once by a busy engine. ``queue``: most groups that waited for an engine.
    ``driver_cpu_s``: processor seconds per step, without Ray and the records' real sizes. ``bars``: the spans
    of each worker since the run began. ``ends``: times at which its steps ended, of which ``timed`` count.
    """

    step_s: float
    stage_s: dict[str, float]
    idle: dict[str, float]
    tokens: float
    completion_tokens: float
    samples: float
    sequences: float
    longest_batch_s: float
    longest_update_s: float
    queue: int
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


def evaluation_s(scenario: Scenario, sizes: Sequence[int]) -> float:
    """Return the seconds of the real evaluation on otherwise idle simulated workers.

    ``sizes``: prompts of each set; sets are evaluated one after the other.
    """
    config, tokens = as_planned(scenario), scenario.workload.prompt_tokens
    sets = [EvalSet(str(i), fake_records.prompts(size, tokens)) for i, size in enumerate(sizes)]

    async def session() -> float:
        cluster = SimulatedCluster(scenario)
        await evaluate(config, cluster.workers, sets, StepRecorder(cluster.trace), step=0)
        return asyncio.get_running_loop().time()

    return run_virtually(session)


async def _run(scenario: Scenario, config: Config) -> tuple[SimulatedCluster, StepRecorder]:
    """Run the loop to its last step."""
    cluster = SimulatedCluster(scenario)
    recorder = StepRecorder(cluster.trace)
    # Dynamic sampling discards prompts, and slow groups keep theirs: enough for all that are in flight.
    spare = config.dynamic_sampling.enabled or config.batch.order == "completion"
    batches = max(4 * (config.max_staleness + 1) if spare else 1, scenario.epoch_steps)
    progress = None
    if config.data.order == "length":
        batches = max(batches, config.data.length_window or 8)
    prompts = fake_records.prompts(batches * config.batch.prompts_per_step, scenario.workload.prompt_tokens)
    if config.data.order == "length":  # an epoch before has shown the lengths
        known = scenario.workload.known_lengths([p.uid for p in prompts], config.batch.samples_per_prompt)
        progress = Progress(pipeline=PipelineState(order=OrderState(lengths=known)))
    await driver.run(config, cluster.workers, prompts, [], recorder, _NoCheckpoints(), progress)
    return cluster, recorder


def _measured(cluster: SimulatedCluster, recorder: StepRecorder, timed: slice, spent: float) -> Simulated:
    bars, rollouts = cluster.trace.bars, cluster.rollouts
    ends = [0.0, *(step.end for step in recorder.steps)]
    steps = recorder.steps[timed]
    begin, end = ends[timed.start], steps[-1].end
    seconds, count = end - begin, len(steps)

    def busy(stage: str) -> float:
        return covered_s((s for spans in bars.values() for s in spans if s.stage == stage), begin, end)

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
        tokens=sum(s.tokens for s in steps) / count,
        completion_tokens=sum(s.completion_tokens for s in steps) / count,
        samples=sum(s.samples for s in steps) / count,
        sequences=rollouts.sequences,
        longest_batch_s=max(rollouts.batch_s),
        longest_update_s=max(s.end - s.begin for s in bars["policy"] if s.stage == "update"),
        queue=rollouts.longest_queue,
        staleness=sum(s.staleness for s in steps) / count,
        length_bias=steps[-1].length_bias,
        driver_cpu_s=max(0.0, spent - cluster.trace.excluded_s) / len(recorder.steps),
        bars=bars,
        ends=ends[1:],
        timed=timed,
    )


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """``end``: seconds since the run began. ``tokens``: of prompts and completions."""

    end: float
    tokens: int
    completion_tokens: int
    samples: int
    staleness: float
    length_bias: float  # NaN without `batch.order` completion


class StepRecorder:
    """The recorder of a simulated run: it keeps the time and the tokens of each step, and writes nothing."""

    directory = Path()

    def __init__(self, trace: SimulationTrace) -> None:
        self._trace, self._loop = trace, asyncio.get_running_loop()
        self._samples = self._tokens = self._completion_tokens = 0  # of the step that is logged next
        self.steps: list[SimulatedStep] = []

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        with self._trace.excluded():
            self._samples = sum(len(g.rollouts) for g in groups)
            self._tokens = sum(int(g.prompt.token_ids[0]) * len(g.rollouts) for g in groups)
            self._completion_tokens = sum(sum(fake_records.tokens_of(g.rollouts)) for g in groups)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(
            SimulatedStep(
                self._loop.time(),
                self._tokens + self._completion_tokens,
                self._completion_tokens,
                self._samples,
                metrics["rollout/staleness_mean"],
                metrics.get("rollout/length_bias", math.nan),
            )
        )

    def back_to(self, step: int) -> None:
        """Do nothing: no worker of a simulated run fails."""

    def spans(self, step: int, own: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """Ignore the driver's spans: the trace has those of the workers."""

    def ledger(self, step: int, entry: LedgerEntry) -> None:
        """Keep no ledger."""

    def quarantine(self, step: int, groups: list[Group]) -> str:
        return "nowhere"

    def warn(self, message: str) -> None:
        """Ignore warnings: a simulated run has no health to watch."""

    def note(self, message: str) -> None:
        """Ignore events."""

    def flush(self) -> None:
        """Write nothing."""

    def phase(self, name: str) -> None:
        """Show nothing."""


class _NoCheckpoints:
    """Saves nothing: `whole_run` adds what checkpoints take."""

    async def save(self, step: int, workers: Workers, progress: Progress) -> None: ...

    async def settle(self) -> None: ...
