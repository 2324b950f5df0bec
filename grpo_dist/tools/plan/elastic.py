"""What a run gains while further engines serve (`rollout.max_workers`)."""

from __future__ import annotations

from dataclasses import replace

from grpo_dist.config.files import changed
from grpo_dist.tools.plan.options import Planned
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.simulation import Simulated, simulate

_MOST_ROWS = 5


def elastic_lines(planned: Planned) -> list[str]:
    """Return a line for each number of engines, from those that are reserved to the most; [] where engines
    never join. Each is a simulation of the same steps on as many engines throughout.

    elastic: 4 engines: 14.2 s a step, 0.52 of the time with 1; 114 GPU-seconds a step; policy idle 40 %
    """
    rollout = planned.option.config.rollout
    if not rollout.may_grow:
        return []
    gpus, base, lines = planned.option.roles.gpus, planned.simulated, []
    for count in _counts(rollout.num_workers, rollout.most_workers):
        run = base if count == rollout.num_workers else _with_engines(planned.option.scenario, count)
        held = gpus + (count - rollout.num_workers) * rollout.tensor_parallel_size
        cost = f"; {held * run.step_s:,.0f} GPU-seconds a step" if gpus else ""
        lines.append(
            f"elastic: {count} engine(s): {run.step_s:,.1f} s a step, {run.step_s / base.step_s:.2f} of the "
            f"time with {rollout.num_workers}{cost}; policy idle {run.idle['policy']:.0%}"
        )
    return lines


def _with_engines(scenario: Scenario, count: int) -> Simulated:
    return simulate(replace(scenario, config=changed(scenario.config, {"rollout.num_workers": count})))


def _counts(least: int, most: int) -> list[int]:
    """Return doubled numbers from ``least`` to ``most``, at most five."""
    found = [least]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return [*found[: _MOST_ROWS - 1], most] if len(found) > _MOST_ROWS else found
