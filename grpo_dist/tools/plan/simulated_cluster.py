"""All simulated workers of one run, and the restart of them after a failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from grpo_dist.config import Config
from grpo_dist.tools.plan import teachers
from grpo_dist.tools.plan.engines import Engine
from grpo_dist.tools.plan.failures import SimulatedFailures
from grpo_dist.tools.plan.reward_models import role_of
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.shown_rows import shown_rows
from grpo_dist.tools.plan.simulated_gpus import ENGINES, POLICY, SimulatedGpus
from grpo_dist.tools.plan.simulated_workers import (
    TimedPolicy,
    TimedReference,
    TimedRewards,
    TimedRollouts,
    TimedWeightSync,
)
from grpo_dist.tools.plan.stragglers import SlowTimes
from grpo_dist.tools.plan.trace import SimulationTrace
from grpo_dist.workers import Workers


class SimulatedCluster:
    """Replaces `actors.cluster.Cluster`. ``config``: as `as_planned` returns it. Needs a running loop."""

    def __init__(self, scenario: Scenario, config: Config) -> None:
        rates, count = scenario.rates, config.rollout.num_workers
        trace = self.trace = SimulationTrace([*(f"rollout-{i}" for i in range(count)), "policy"])
        engines = [_engine(scenario, trace, i) for i in range(count)]
        gpus = simulated_gpus(scenario, trace)
        self.rollouts = TimedRollouts(engines, rates, scenario.workload, scenario.capacity, trace, gpus)
        self.failures = SimulatedFailures(
            scenario.failures, engines, self.rollouts.load_balancer, trace, config.seed
        )
        rewards = TimedRewards(
            rates,
            self.rollouts,
            trace,
            gpus,
            graders=config.rewards.num_workers,
            models=[(model, scenario.reward_model_workers(model)) for model in scenario.reward_models],
            signal_share=scenario.signal_share,
        )
        turn = POLICY if scenario.reference_is_base else "reference"
        reference = TimedReference(rates, trace, gpus, turn=turn, workers=scenario.reference_workers)
        policy = TimedPolicy(
            rates,
            self.failures,
            trace,
            gpus,
            slowdown=scenario.stragglers.rank_factor,
            shared_tokens=scenario.workload.shared_tokens,
            shown=shown_rows(
                scenario.config.demonstrations,
                updates=scenario.config.batch.updates_per_step,
                longest=scenario.config.max_length,
            ),
        )
        sync = TimedWeightSync(rates, self.rollouts, policy, gpus)
        # Simulated workers have only the methods that a planned run calls.
        roles: tuple[Any, ...] = (
            self.rollouts, rewards, reference if config.needs_reference else None, policy, sync,
        )  # fmt: skip
        own = {
            t.name: TimedReference(
                teachers.rates_of(t, rates), trace, gpus,
                turn=teachers.role_of(t), workers=scenario.teacher_workers(t), name=f"teacher-{t.name}",
            )
            for t in config.distillation.of_own_models
        }  # fmt: skip
        self.workers = replace(Workers(*roles), teachers=cast(Any, own))

    async def begin(self) -> Workers:
        return self.workers

    @asynccontextmanager
    async def failures_as_state_lost(self) -> AsyncIterator[None]:
        yield

    async def start_again(self, model_dir: Path) -> Workers:
        """Restart all policy ranks. Raises StateLost where a rank fails meanwhile."""
        await self.failures.restart_ranks()
        return self.workers

    async def where_stuck(self) -> str:
        return ""


def simulated_gpus(scenario: Scenario, trace: SimulationTrace) -> SimulatedGpus:
    """Return the GPUs that the roles of ``scenario`` share, with the times of their turns."""
    if not scenario.sharing:
        return SimulatedGpus(trace, {})
    rates = scenario.rates
    turn_s = {ENGINES: rates.turn_s(), POLICY: rates.turn_s()}
    if "reference" in scenario.sharing:
        turn_s["reference"] = rates.reference_turn_s()
    for teacher in scenario.config.distillation.of_own_models:
        turn_s[teachers.role_of(teacher)] = teachers.rates_of(teacher, rates).reference_turn_s()
    for model in scenario.reward_models:
        turn_s[role_of(model.settings)] = rates.reward_model_turn_s(model)
    return SimulatedGpus(trace, turn_s, resend_s=rates.resend_s())


def _engine(scenario: Scenario, trace: SimulationTrace, index: int) -> Engine:
    rates, slow = scenario.rates, scenario.stragglers
    times = rates if index >= slow.engines else SlowTimes(rates, slow.engine_factor)
    spans = trace.bars[f"rollout-{index}"]
    return Engine(times, scenario.capacity, meter=trace.excluded, spans=spans)
