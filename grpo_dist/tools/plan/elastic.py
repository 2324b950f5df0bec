"""What a run gains while further engines serve (`rollout.max_workers`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_dist.config.files import changed
from grpo_dist.tools.plan.options import Planned
from grpo_dist.tools.plan.scenario import Scenario
from grpo_dist.tools.plan.simulation import Simulated, simulate
from grpo_dist.tools.plan.whole_run import WholeRun

_MOST_ROWS = 5
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the run's time with all engines


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """A whole run in which all engines serve for a share of the time, and else those that are reserved.

    Attributes:
        share: of the time, 0 to 1.
        hours: until the last step, with evaluations and checkpoints.
        gpu_hours: of all GPUs that are held meanwhile; 0 without GPUs.
        even: price of a joining engine's GPU, as a share of that of the others, at which the run costs what
            it does without joining engines; 0 where none join.
    """

    share: float
    hours: float
    gpu_hours: float
    even: float = 0.0


def elastic_lines(planned: Planned, whole: WholeRun, *, price: float) -> list[str]:
    """Return a line for each number of engines, from those that are reserved to the most; then the hours and
    the price of the run by the share of its time with all of them. [] where engines never join.

    Each number is a simulation of the same steps on as many engines throughout. ``whole``: the run with the
    reserved engines; ``price``: dollars of a GPU for an hour, 0: unknown.

    elastic: 4 engines: 14.2 s a step, 0.52 of the time with 1; 114 GPU-seconds a step; policy idle 40 %
    """
    rollout = planned.option.config.rollout
    if not rollout.may_grow:
        return []
    gpus, base, lines = planned.option.roles.gpus, planned.simulated, []
    run = base
    for count in _counts(rollout.num_workers, rollout.most_workers):
        run = base if count == rollout.num_workers else _with_engines(planned.option.scenario, count)
        held = gpus + (count - rollout.num_workers) * rollout.tensor_parallel_size
        cost = f"; {held * run.step_s:,.0f} GPU-seconds a step" if gpus else ""
        lines.append(
            f"elastic: {count} engine(s): {run.step_s:,.1f} s a step, {run.step_s / base.step_s:.2f} of the "
            f"time with {rollout.num_workers}{cost}; policy idle {run.idle['policy']:.0%}"
        )
    extra = (rollout.most_workers - rollout.num_workers) * rollout.tensor_parallel_size if gpus else 0
    runs = elastic_runs(whole, run.step_s / base.step_s, gpus=gpus, extra=extra)
    return [*lines, *_run_lines(list(runs), rollout.num_workers, rollout.most_workers, price)]


def elastic_runs(whole: WholeRun, ratio: float, *, gpus: int, extra: int) -> Iterator[ElasticRun]:
    """Yield the run for each share of its time with all engines.

    ``whole``: with the reserved engines on ``gpus``; ``ratio``: seconds of a step with all engines, which
    take ``extra`` GPUs more, to one with those. In a share f of the time the steps are done at a rate of
    1 / ratio: they take S / (f / ratio + 1 - f), with S their time on the reserved engines. Evaluations and
    checkpoints take as long as before.
    """
    alone = whole.steps_s + whole.overhead_s
    for share in _SHARES:
        seconds = whole.steps_s / (share / ratio + 1 - share) + whole.overhead_s
        joined = share * extra * seconds
        even = gpus * (alone - seconds) / joined if joined else 0.0
        yield ElasticRun(share, seconds / 3600, (gpus * seconds + joined) / 3600, even)


def _run_lines(runs: list[ElasticRun], least: int, most: int, price: float) -> list[str]:
    """Describe ``runs``, and what the time with all engines saves."""
    first = runs[0]
    lines = []
    for run in runs:
        cost = ""
        if run.gpu_hours:
            cost = f", {run.gpu_hours:,.1f} GPU-hours"
            cost += f", ${price * run.gpu_hours:,.2f}" if price else ""
        when = {0.0: f"{least} engine(s) throughout", 1.0: f"{most} throughout"}
        name = when.get(run.share, f"{most} for {run.share:.0%} of the time")
        saved = f"; {1 - run.hours / first.hours:.0%} less time" if run.share else ""
        saved += f", at no cost where a joining GPU has {run.even:.2f} of the price" if run.even > 0 else ""
        lines.append(f"elastic, the whole run: {name}: {run.hours:,.2f} h{cost}{saved}")
    return [
        *lines,
        "elastic: left out: the start of an engine that joins; dollars are with one price for all GPUs",
    ]


def _with_engines(scenario: Scenario, count: int) -> Simulated:
    return simulate(replace(scenario, config=changed(scenario.config, {"rollout.num_workers": count})))


def _counts(least: int, most: int) -> list[int]:
    """Return doubled numbers from ``least`` to ``most``, at most five."""
    found = [least]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return [*found[: _MOST_ROWS - 1], most] if len(found) > _MOST_ROWS else found
