"""Computes the figures of a benchmark from its timed steps and limits.

A stage's rate is what it did per second that it was busy; a share is of the loop's own time. Where several
workers are busy at once, the seconds of a stage are the mean over them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from grpo_dist.runtime.metering import Span
from grpo_dist.tools.bench.flops import Shape
from grpo_dist.tools.bench.needed import NeededWork
from grpo_dist.tools.bench.record import StepRecord

_SYNC_PARTS = tuple(f"time/sync_{part}_s" for part in ("stop", "travel", "take"))
_MEANS = {  # figures that are means of a metric over the steps that have it
    "sync/changed_share": "sync/changed_share",
    "training/needed_share": "throughput/packing_efficiency",
}


@dataclass(frozen=True, slots=True)
class StageLimits:
    """What the machine reaches without this project, None where that was not measured; ``settings``: how it
    was measured.
    """

    generation_tokens_per_s: float | None
    training_tokens_per_s: float | None
    sync_bytes_per_s: float | None
    settings: dict[str, str]


def figures(
    steps: Sequence[StepRecord],
    *,
    shape: Shape,
    peak_flops: float | None,
    limits: StageLimits | None,
    overlapped: bool,
    frozen: bool = False,
) -> dict[str, float]:
    """Return the figures of the timed ``steps`` by name. ``peak_flops``: of all policy ranks together.
    ``overlapped``: sampling runs ahead, so the largest limit bounds a step instead of their sum. ``frozen``:
    adapters alone are trained.
    """
    seconds = sum(step.seconds for step in steps)
    completion = sum(r.length for s in steps for r in s.requests)
    tokens = sum(r.tokens for s in steps for r in s.requests)
    sampling = _total(steps, "time/rollout_sample_busy_s")
    update, scoring = _total(steps, "time/policy_update_busy_s"), _total(steps, "time/reward_score_busy_s")
    sync = sum(map(_sync_s, steps))
    work = sum(NeededWork.from_step(step).flops(shape, frozen=frozen) for step in steps)
    trained = _total(steps, "train/tokens")
    values = {
        "loop/step_s": seconds / len(steps),
        "loop/step_median_s": statistics.median(step.seconds for step in steps),
        "loop/tokens_per_s": tokens / seconds,
        "loop/completion_tokens_per_s": completion / seconds,
        "loop/samples_per_s": sum(len(s.requests) for s in steps) / seconds,
        "generation/tokens_per_s": _total(steps, "throughput/rollout_tokens") / sampling,
        "generation/step_s": sampling / len(steps),
        "training/tokens_per_s": trained / update,
        "training/step_s": update / len(steps),
        "scoring/samples_per_s": sum(len(s.requests) for s in steps) / scoring,
        "scoring/step_s": scoring / len(steps),
        "sync/bytes_per_s": _total(steps, "sync/bytes") / sync,
        "sync/step_s": sync / len(steps),
        "sync/bytes": _total(steps, "sync/bytes") / len(steps),
        **_means(steps, _MEANS),
        **shares(steps),
        **_draft_figures(steps),
        **_episode_figures(steps),
        **_tail_figures(steps),
        "overhead/driver_cpu_s": _total(steps, "time/driver_cpu_s") / len(steps),
    }
    if peak_flops:
        # Rows that no update trained on do not count as work: in proportion to their tokens.
        values["training/mfu"] = work * (trained / tokens) / update / peak_flops
        values["training/peak_flops"] = peak_flops
    if limits:
        values |= _limit_figures(
            values, limits, tokens_per_step=(completion, trained), steps=len(steps), overlapped=overlapped
        )
    return values


def _sync_s(step: StepRecord) -> float:
    """Return the seconds in which engines stop, get the weights and take them. ``time/sync_s`` also has the
    driver's wait for changes of turns on shared GPUs.
    """
    parts = [step.metrics[part] for part in _SYNC_PARTS if part in step.metrics]
    return sum(parts) if parts else step.metrics.get("time/sync_s", 0.0)


def _turns_s(step: StepRecord) -> float:
    """Return the seconds of changes of turns on shared GPUs, one after the other; 0 on GPUs of their own."""
    return sum(value for key, value in step.metrics.items() if key.startswith("time/turn_"))


def _means(steps: Sequence[StepRecord], names: Mapping[str, str]) -> dict[str, float]:
    """Return the mean over the steps that have it of each metric, by the name of its figure."""
    means = {}
    for figure, metric in names.items():
        if values := [step.metrics[metric] for step in steps if metric in step.metrics]:
            means[figure] = statistics.fmean(values)
    return means


def _draft_figures(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the tokens that a pass gives a sample with a draft; {} where nothing was drafted."""
    if not (drafts := _total(steps, "throughput/rollout_drafts")):
        return {}
    right = _total(steps, "throughput/rollout_accepted_tokens")
    return {"generation/acceptance_length": 1 + right / drafts}


def _episode_figures(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return turns of a sample and the wait for an environment between two; {} without environments."""
    turns = [step.metrics.get("throughput/rollout_turns", 0.0) for step in steps]
    if not sum(turns):
        return {}
    waited = sum(n * s.metrics.get("time/tool_wait_s", 0.0) for n, s in zip(turns, steps, strict=True))
    return {
        "episodes/turns": sum(turns) / sum(len(step.requests) for step in steps),
        "episodes/tool_wait_s": waited / sum(turns),
        "episodes/cached_share": steps[-1].metrics.get("throughput/episode_cached_share", math.nan),
    }


def _tail_figures(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the staleness of the samples; with `batch.order` completion also the mean steps that a group
    was carried over, and by how much the samples trained so far are longer than what was launched.
    """
    tail = {"tail/staleness": _total(steps, "rollout/staleness_mean") / len(steps)}
    if any("group/carried_over" in step.metrics for step in steps):
        waited = _total(steps, "group/waited_steps") / len(steps)
        tail |= {"tail/waited_steps": waited}
        tail |= {"tail/length_bias": steps[-1].metrics.get("rollout/length_bias", math.nan)}
    return tail


def shares(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return shares of the loop's time, each moment counted once in this order, which add up to 1; and how
    long rollout and trainer were idle.

        generation   an engine has a request
        training     an update runs, and no engine has a request
        sync, scoring, reference   likewise
        turns        shared GPUs change from one role to another, and nothing of the above runs
        overhead     nothing of these runs in any actor: driver, Ray, log
    """
    begin, end = steps[0].begin, steps[-1].end
    of_stage: dict[str, list[Span]] = {
        stage: [] for stage in ("sample", "update", "sync", "score", "logprobs")
    }
    for step in steps:
        for usage in step.usage.values():
            for span in usage.spans:
                if span.stage in of_stage:  # environments act within a request of an engine
                    of_stage[span.stage].append(span)
    seconds = end - begin
    names = {
        "sample": "generation",
        "update": "training",
        "sync": "sync",
        "score": "scoring",
        "logprobs": "reference",
    }
    stages, before, covered = {}, [], 0.0
    for stage, spans in of_stage.items():
        before += spans
        total = covered_s(before, begin, end)
        stages[f"share/{names[stage]}"] = (total - covered) / seconds
        covered = total
    # A change has no span; with the stages that run meanwhile it cannot be more than what they leave.
    turns = min(sum(map(_turns_s, steps)), seconds - covered)
    if turns > 0:
        stages["share/turns"] = turns / seconds
    stages["share/overhead"] = 1.0 - (covered + turns) / seconds
    stages["overhead/step_s"] = (seconds - covered - turns) / len(steps)
    stages["idle/rollout"] = 1.0 - _total(steps, "time/rollout_sample_busy_s") / seconds
    busy = _total(steps, "time/policy_update_busy_s") + _total(steps, "time/policy_sync_busy_s")
    stages["idle/trainer"] = 1.0 - busy / seconds
    return stages


def covered_s(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return the seconds between ``begin`` and ``end`` in which at least one of ``spans`` lasts.

    [0, 2], [1, 3], [5, 9] between 0 and 6 -> 4
    """
    total, reached = 0.0, begin
    for span in sorted(spans, key=lambda s: s.begin):
        start, stop = max(span.begin, reached), min(span.end, end)
        if stop > start:
            total += stop - start
            reached = stop
    return total


def _limit_figures(
    figures: dict[str, float],
    limits: StageLimits,
    *,
    tokens_per_step: tuple[float, float],
    steps: int,
    overlapped: bool,
) -> dict[str, float]:
    completion, trained = tokens_per_step
    of_stage = (
        ("generation", "tokens_per_s", completion / steps, limits.generation_tokens_per_s),
        ("training", "tokens_per_s", trained / steps, limits.training_tokens_per_s),
        ("sync", "bytes_per_s", figures["sync/bytes"], limits.sync_bytes_per_s),
    )
    limited, at_best = dict[str, float](), list[float]()
    for stage, unit, work, rate in of_stage:
        if rate is not None:
            at_best.append(work / rate)
            limited |= {f"limit/{stage}_{unit}": rate, f"limit/{stage}_step_s": work / rate}
            limited[f"of_limit/{stage}"] = figures[f"{stage}/{unit}"] / rate
    if len(at_best) < len(of_stage):
        return limited
    bound = max(at_best) if overlapped else sum(at_best)
    return limited | {
        "limit/step_s": bound,
        "of_limit/loop": bound / figures["loop/step_s"],
        "loop/step_over_limit": figures["loop/step_s"] / bound,
    }


def _total(steps: Sequence[StepRecord], metric: str) -> float:
    return sum(step.metrics.get(metric, 0.0) for step in steps)
