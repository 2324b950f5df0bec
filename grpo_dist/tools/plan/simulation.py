"""The real driver loop on simulated workers and a simulated clock.

    driver.run, pipeline, admission, staging, health    as in production; recovery, too
    workers                                            wait for as long as `Rates` say, by a `VirtualLoop`

What the driver's own code costs is the processor's time, measured apart from that of the simulated workers'.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from grpo_dist import driver
from grpo_dist.config import Config, HealthConfig
from grpo_dist.runs.checkpoint import Place
from grpo_dist.runs.recovery import Recovery
from grpo_dist.runtime.metering import Span
from grpo_dist.tools.bench.figures import covered_s
from grpo_dist.tools.plan import made_records
from grpo_dist.tools.plan.failures import NO_LOSSES, LossRates
from grpo_dist.tools.plan.rates import Rates
from grpo_dist.tools.plan.reward_models import KnownRewardModel
from grpo_dist.tools.plan.simulated_workers import World
from grpo_dist.tools.plan.stragglers import EVEN, Slow
from grpo_dist.tools.plan.virtual_clock import run_virtually
from grpo_dist.tools.plan.workload import Workload
from grpo_dist.workers import Workers

# Rewards of stand-ins have one part and no steps, and which estimator reads them takes no time.
_ESTIMATOR = {"advantage": "grpo", "std": None}
_AS_OFTEN = 10**9  # as it takes
_FOREVER_S = 1e9  # deadlines of a simulated run: the report says what would pass those of the configuration


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. ``seats``: sequences an engine decodes at once. ``colocated``: engines and policy
    take turns. ``signal_share``: groups whose rewards differ. ``losses``: of engines, and of policy ranks,
    after which all of them go back to the last checkpoint. ``slow``: who is slower than the others.
    ``reward_models``: those that score, of those whose sizes are known.
    """

    config: Config
    rates: Rates
    workload: Workload
    seats: int
    colocated: bool
    signal_share: float = 1.0
    losses: LossRates = NO_LOSSES
    slow: Slow = EVEN
    reward_models: tuple[KnownRewardModel, ...] = ()
    warmup_steps: int = 1
    steps: int = 4


@dataclass(frozen=True)
class Simulated:
    """Means over the timed steps. ``stage_s``: seconds a step in which at least one worker does a stage;
    ``idle``: share of the time that engines, and the policy, have nothing to do; ``engines_idle``: of each
    engine; ``tokens``: of prompts and completions sampled for a step, those that dynamic sampling puts aside,
    too. ``sequences``: decoded at once by an engine while it is busy. ``lost``: engines; ``gone_back``: times
    to the last checkpoint. ``queue``: groups that waited for an engine at most. ``driver_cpu_s``: of a
    processor, a step, without Ray and the records' real sizes. ``bars``: what each track did when, since the
    begin of the run; ``ends``: of its steps, of which ``timed`` count.
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
    lost: int
    gone_back: int
    staleness: float
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
    worlds: list[World] = []

    async def session() -> None:
        world = world_of(scenario, config)
        worlds.append(world)
        # Batches with their further prompts, as many as are on their way.
        several = 4 * (config.max_staleness + 1) if config.dynamic_sampling.enabled else 1
        prompts = made_records.prompts(
            several * config.batch.prompts_per_step, scenario.workload.prompt_tokens
        )

        async def go_on(place: Place, workers: Workers) -> None:
            await driver.run(
                config,
                workers,
                prompts,
                [],
                world,
                world.checkpoints,
                start=place.step,
                progress=place.progress,
            )

        recovery = Recovery(config, world.losses, world, world.checkpoints.newest, world.directory)
        try:
            await recovery.carry_through(go_on, Place(), world.begin)
        finally:
            world.losses.end()

    begin = time.process_time()
    run_virtually(session)
    spent = time.process_time() - begin
    first = scenario.warmup_steps + config.max_staleness
    return _measured(worlds[0], slice(first, first + scenario.steps), spent, config)


def world_of(scenario: Scenario, config: Config) -> World:
    """Its workers, within a running loop. ``config``: as `as_planned` makes it."""
    return World(
        config,
        scenario.rates,
        scenario.workload,
        seats=scenario.seats,
        colocated=scenario.colocated,
        signal_share=scenario.signal_share,
        loss_rates=scenario.losses,
        slow=scenario.slow,
        reward_models=scenario.reward_models,
    )


def _measured(world: World, timed: slice, spent: float, config: Config) -> Simulated:
    ends = [0.0, *(step.end for step in world.steps)]
    steps = world.steps[timed]
    begin, end = ends[timed.start], steps[-1].end
    seconds, count = end - begin, len(steps)

    def busy(stage: str) -> float:
        return covered_s((s for own in world.bars.values() for s in own if s.stage == stage), begin, end)

    stages = ("sample", "reward_model", "score", "logprobs", "update", "sync", "turn")
    engines = [name for name in world.bars if name.startswith("rollout")]
    sampling = [
        covered_s((s for s in world.bars[name] if s.stage == "sample"), begin, end) for name in engines
    ]
    policy = [s for s in world.bars["policy"] if s.stage in ("update", "sync")]
    return Simulated(
        step_s=seconds / count,
        stage_s={stage: busy(stage) / count for stage in stages if busy(stage)},
        idle={
            "rollout": 1.0 - sum(sampling) / config.rollout.num_workers / seconds,
            "policy": 1.0 - covered_s(policy, begin, end) / seconds,
        },
        engines_idle=[1.0 - own / seconds for own in sampling],
        tokens=sum(s.tokens for s in steps) / count,
        completion_tokens=sum(s.completion_tokens for s in steps) / count,
        samples=sum(s.samples for s in steps) / count,
        sequences=world.sequences,
        longest_batch_s=max(world.batch_s),
        longest_update_s=max(s.end - s.begin for s in world.bars["policy"] if s.stage == "update"),
        queue=world.queue,
        lost=world.losses.engines_lost,
        gone_back=world.losses.gone_back,
        staleness=sum(s.staleness for s in steps) / count,
        driver_cpu_s=max(0.0, spent - world.apart_s) / world.logged,
        bars=world.bars,
        ends=ends[1:],
        timed=timed,
    )


def as_planned(scenario: Scenario) -> Config:
    """Nothing beside the steps; where sampling runs ahead the last ones have nothing more to sample."""
    config = scenario.config
    every = config.checkpoint.every if scenario.losses.rank_s else 0
    greedy = config.algorithm.advantage == "remax"  # which samples an answer more of each prompt
    timeouts = dict.fromkeys(type(config.cluster.timeouts).model_fields, _FOREVER_S)
    cluster = config.cluster.model_copy(
        update={
            "timeouts": config.cluster.timeouts.model_copy(update=timeouts),
            "restarts": config.cluster.restarts.model_copy(update={"max_per_worker": _AS_OFTEN}),
        }
    )
    parts: dict[str, Any] = {
        "evaluation": config.evaluation.model_copy(update={"before": False, "after": False, "every": 0}),
        "checkpoint": config.checkpoint.model_copy(update={"every": every, "export": False}),
        "health": HealthConfig(min_signal_groups=0),
        "reference": config.reference.model_copy(update={"refresh_every": 0}),
        "rewards": config.rewards.model_copy(update={"models": (), "shuffle": False}),
        "algorithm": config.algorithm.model_copy(update=_ESTIMATOR) if not greedy else config.algorithm,
        "data": config.data.model_copy(update={"order": "epochs"}),
        "tracking": config.tracking.model_copy(update={"samples": False}),
    }
    steps = scenario.warmup_steps + scenario.steps + 2 * config.max_staleness
    return config.model_copy(update={"steps": steps, "cluster": cluster} | parts)
