"""Computes the figures of a benchmark from its timed steps and limits.

A stage's rate is its work per busy second; a share is relative to the loop's time. If several workers are
busy at once, a stage's seconds are their mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_dist.batch.shared_prefixes import shared_prefix_lengths
from grpo_dist.runtime.metering import Span
from grpo_dist.tools.bench.flops import Shape, decoder_flops
from grpo_dist.tools.bench.record import StepRecord
from grpo_dist.tools.bench.result import DecodeStep

_SYNC_PARTS = tuple(f"time/sync_{part}_s" for part in ("stop", "travel", "take"))
_SHARES = {
    "sample": "generation", "update": "training", "sync": "sync", "score": "scoring", "logprobs": "reference",
}  # fmt: skip
_MEANS = {  # figures that are means of a metric over the steps that have it
    "sync/changed_share": "sync/changed_share",
    "training/needed_share": "throughput/packing_efficiency",
}


@dataclass(frozen=True)
class MachineLimits:
    """Hardware limits, measured without this project's code; None: not measured.

    ``settings``: how they were measured. ``matmul_flops``: operations per second of a matrix product on the
    policy's threads. ``decode_steps``: single engine steps.
    """

    generation_tokens_per_s: float | None = None
    training_tokens_per_s: float | None = None
    sync_bytes_per_s: float | None = None
    matmul_flops: float | None = None
    settings: dict[str, str] = field(default_factory=dict)
    decode_steps: list[DecodeStep] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NeededWork:
    """The necessary work of an update, for `training/mfu` and the limit of training.

    Prefixes shared across a step's updates or ranks count once, although they are computed repeatedly. So
    the limit is slightly too high.

    ``tokens``: each shared prefix once. ``pairs``: (token, attended token). ``trained``: trained tokens.
    """

    tokens: int
    pairs: int
    trained: int

    @classmethod
    def from_step(cls, step: StepRecord) -> NeededWork:
        """Return the work for the samples of ``step``."""
        distinct = [np.array(ids) for ids in {r.prompt_ids for r in step.requests}]
        prompts = zip(map(len, distinct), shared_prefix_lengths(distinct).tolist(), strict=True)
        spans = [
            *((len(r.prompt_ids), r.tokens) for r in step.requests),
            *((length, n) for n, length in prompts),
        ]
        return cls.from_spans(spans, trained=sum(r.length for r in step.requests))

    @classmethod
    def from_spans(cls, spans: Sequence[tuple[int, int]], *, trained: int) -> NeededWork:
        """Return the work for tokens ``begin`` to ``end`` of sequences; tokens attend to all earlier ones."""
        return cls(
            tokens=sum(end - begin for begin, end in spans),
            pairs=sum(_pairs(end) - _pairs(begin) for begin, end in spans),
            trained=trained,
        )

    def __add__(self, other: NeededWork) -> NeededWork:
        return NeededWork(self.tokens + other.tokens, self.pairs + other.pairs, self.trained + other.trained)

    def row_tokens(self, longest: int) -> int:
        """Return the length of rows without shared prefixes that have the same pairs per token, at most the
        ``longest`` sample's length, which fits in memory.
        """
        return max(1, min(longest, round(2 * self.pairs / self.tokens - 1)))

    def flops(self, shape: Shape, *, frozen: bool = False) -> float:
        """Return the operations of a forward and a backward pass. ``frozen``: only adapters are trained."""
        return decoder_flops(shape, self.tokens, self.pairs, self.trained, frozen=frozen)


def _pairs(tokens: int) -> int:
    """Return the pairs of causal attention over ``tokens``."""
    return tokens * (tokens + 1) // 2


def figures(
    steps: Sequence[StepRecord],
    *,
    shape: Shape | None,
    peak_flops: float | None,
    limits: MachineLimits,
    overlapped: bool,
    frozen: bool = False,
) -> dict[str, float]:
    """Return the figures of the timed ``steps`` by name. ``shape``: None if the model's operations cannot be
    counted. ``peak_flops``: all policy ranks together. ``overlapped``: sampling runs ahead, so the largest
    limit bounds a step instead of their sum. ``frozen``: only adapters are trained.
    """
    seconds = sum(step.seconds for step in steps)
    completion = sum(r.length for s in steps for r in s.requests)
    tokens = sum(r.tokens for s in steps for r in s.requests)
    sampling = _total(steps, "time/rollout_sample_busy_s")
    update, scoring = _total(steps, "time/policy_update_busy_s"), _total(steps, "time/reward_score_busy_s")
    sync = sum(map(_sync_s, steps))
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
        **shares(steps),
        **_further_figures(steps),
        "overhead/driver_cpu_s": _total(steps, "time/driver_cpu_s") / len(steps),
    }
    if peak_flops:
        values["training/peak_flops"] = peak_flops
    if peak_flops and shape:
        work = sum(NeededWork.from_step(step).flops(shape, frozen=frozen) for step in steps)
        # Excludes rows that no update trained on, in proportion to their tokens.
        values["training/mfu"] = work * (trained / tokens) / update / peak_flops
    work_of_stages = {
        "generation/tokens_per_s": (completion / len(steps), limits.generation_tokens_per_s),
        "training/tokens_per_s": (trained / len(steps), limits.training_tokens_per_s),
        "sync/bytes_per_s": (values["sync/bytes"], limits.sync_bytes_per_s),
    }
    return values | _limit_figures(values, work_of_stages, overlapped=overlapped)


def _sync_s(step: StepRecord) -> float:
    """Return the seconds in which engines pause, receive and load the weights. ``time/sync_s`` also includes
    the driver's wait for role switches on shared GPUs.
    """
    parts = [step.metrics[part] for part in _SYNC_PARTS if part in step.metrics]
    return sum(parts) if parts else step.metrics.get("time/sync_s", 0.0)


def _role_switch_s(step: StepRecord) -> float:
    """Return the seconds of sequential role switches on colocated GPUs; 0 with separate GPUs."""
    return sum(value for key, value in step.metrics.items() if key.startswith("time/turn_"))


def _further_figures(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the staleness of the samples, and figures that only some benchmarks have: tokens per pass with
    speculation; turns of episodes, and the environment wait per turn; with `batch.order` completion the mean
    steps that a group was carried over, and how much longer trained samples are than launched ones.
    """
    last, staleness = steps[-1].metrics, _total(steps, "rollout/staleness_mean") / len(steps)
    further = {"tail/staleness": staleness}
    for figure, metric in _MEANS.items():
        if values := [step.metrics[metric] for step in steps if metric in step.metrics]:
            further[figure] = statistics.fmean(values)
    if drafts := _total(steps, "throughput/rollout_drafts"):
        accepted = _total(steps, "throughput/rollout_accepted_tokens")
        further["generation/acceptance_length"] = 1 + accepted / drafts
    if turns := _total(steps, "throughput/rollout_turns"):
        waits = (
            s.metrics.get("time/tool_wait_s", 0.0) * _total([s], "throughput/rollout_turns") for s in steps
        )
        further |= {
            "episodes/turns": turns / sum(len(step.requests) for step in steps),
            "episodes/tool_wait_s": sum(waits) / turns,
            "episodes/cached_share": last.get("throughput/episode_cached_share", math.nan),
        }
    if any("group/carried_over" in step.metrics for step in steps):
        further["tail/waited_steps"] = _total(steps, "group/waited_steps") / len(steps)
        further["tail/length_bias"] = last.get("rollout/length_bias", math.nan)
    return further


def shares(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return shares of the loop's time that add up to 1, each moment counted once in this order; and the idle
    time of rollout and trainer.

        generation   an engine has a request
        training     an update runs, and no engine has a request
        sync, scoring, reference   likewise
        turns        shared GPUs switch roles, and nothing above runs
        overhead     no actor does any of these: driver, Ray, log
    """
    begin, end = steps[0].begin, steps[-1].end
    seconds = end - begin
    # Environments act during an engine's request.
    spans = [span for step in steps for usage in step.usage.values() for span in usage.spans]
    stages, before, covered = {}, list[Span](), 0.0
    for stage, name in _SHARES.items():
        before += [span for span in spans if span.stage == stage]
        total = covered_s(before, begin, end)
        stages[f"share/{name}"] = (total - covered) / seconds
        covered = total
    # Role switches have no spans, so they count at most the time that other stages leave.
    turns = min(sum(map(_role_switch_s, steps)), seconds - covered)
    if turns > 0:
        stages["share/turns"] = turns / seconds
    stages["share/overhead"] = 1.0 - (covered + turns) / seconds
    stages["overhead/step_s"] = (seconds - covered - turns) / len(steps)
    stages["idle/rollout"] = 1.0 - _total(steps, "time/rollout_sample_busy_s") / seconds
    busy = _total(steps, "time/policy_update_busy_s") + _total(steps, "time/policy_sync_busy_s")
    stages["idle/trainer"] = 1.0 - busy / seconds
    return stages


def covered_s(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return the seconds between ``begin`` and ``end`` covered by at least one of ``spans``.

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
    figures: Mapping[str, float], stages: Mapping[str, tuple[float, float | None]], *, overlapped: bool
) -> dict[str, float]:
    """Return the time of a step at its limits, and the achieved shares of the limits. ``stages``: rate
    figure's name -> (work per step, limit of the rate).
    """
    limited, at_best = dict[str, float](), list[float]()
    for figure, (work, rate) in stages.items():
        if rate is not None:
            stage, unit = figure.split("/")
            at_best.append(work / rate)
            limited |= {f"limit/{stage}_{unit}": rate, f"limit/{stage}_step_s": work / rate}
            limited[f"of_limit/{stage}"] = figures[figure] / rate
    if len(at_best) < len(stages):
        return limited
    bound = max(at_best) if overlapped else sum(at_best)
    return limited | {
        "limit/step_s": bound,
        "of_limit/loop": bound / figures["loop/step_s"],
        "loop/step_over_limit": figures["loop/step_s"] / bound,
    }


def _total(steps: Sequence[StepRecord], metric: str) -> float:
    return sum(step.metrics.get(metric, 0.0) for step in steps)
