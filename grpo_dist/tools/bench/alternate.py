"""Two kinds of steps in one benchmark, which differ in the arguments of their environments alone.

    timed steps     own  other | other  own | own  other | ...        a pair has one of each

A machine that becomes slower during the measurement does so for both kinds: the ratio of a pair leaves that
out, and the order within the pairs changes, so that a steady drift cancels.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_dist.runtime.seeds import request_seed
from grpo_dist.tools.bench.record import StepRecord
from grpo_dist.types import Prompt, Sampling
from grpo_dist.workers import RolloutHandle, RolloutsRef

_RESAMPLED = 1000  # times that the pairs are drawn again, for the spread of their ratio
_OUTSIDE = 0.05  # share of these on each side of the spread


def is_other(batch: int, warmup_steps: int) -> bool:
    """Return whether step ``batch`` (from 0) has the other arguments. Behind one step of warm-up, the steps 0
    to 4 are: yes, no, yes, yes, no.
    """
    return (batch - warmup_steps) % 4 in (1, 2) if batch >= warmup_steps else (batch - warmup_steps) % 2 == 1


class AlternatingEnvironments:
    """``rollouts`` whose episodes have ``kwargs`` in place of their own arguments in every other step.

    Prompts of a step come before those of the next: `max_staleness` is 0.
    """

    def __init__(
        self,
        rollouts: RolloutHandle,
        kwargs: Mapping[str, Any],
        *,
        seed: int,
        samples: int,
        warmup_steps: int,
    ) -> None:
        """``seed``: of the run. ``samples``: of a prompt."""
        self._rollouts, self._kwargs, self._seed = rollouts, kwargs, seed
        self._samples, self._warmup, self._batch = samples, warmup_steps, 0

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef:
        if not self._is_of(self._batch, prompt, seeds):
            self._batch += 1
            assert self._is_of(self._batch, prompt, seeds), "the steps of a benchmark follow each other"
        if prompt.task is not None and is_other(self._batch, self._warmup):
            task = replace(prompt.task, kwargs={**prompt.task.kwargs, **self._kwargs})
            prompt = replace(prompt, task=task)
        return await self._rollouts.sample(prompt, seeds=seeds, sampling=sampling)

    async def abandon(self) -> None:
        await self._rollouts.abandon()

    def _is_of(self, batch: int, prompt: Prompt, seeds: Sequence[int]) -> bool:
        """Return whether the seeds are those of this step. Sample -1 is the greedy one."""
        return seeds[0] in (request_seed(self._seed, batch, prompt.uid, i) for i in range(-1, self._samples))


def divide(steps: Sequence[StepRecord]) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return the timed ``steps`` with their own arguments, and the partner of each with the others."""
    own: list[StepRecord] = []
    other: list[StepRecord] = []
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        pair = (second, first) if is_other(len(own) * 2, 0) else (first, second)
        own.append(pair[0])
        other.append(pair[1])
    return own, other


def pair_figures(own: Sequence[StepRecord], other: Sequence[StepRecord]) -> dict[str, float]:
    """Return the figures of pairs: the ratio of the median steps with its spread, the median and the mean of
    the pairs' ratios, the median step with the other arguments, and how much longer engines were busy.
    """
    ratios = ratios_of(own, other)
    pairs = [(a.seconds, b.seconds) for a, b in zip(own, other, strict=True)]
    low, high = _spread(pairs)
    return {
        "pairs/median_ratio": _median_ratio(pairs),
        "pairs/median_ratio_low": low,
        "pairs/median_ratio_high": high,
        "pairs/step_ratio": statistics.median(ratios),
        "pairs/step_ratio_mean": statistics.mean(ratios),
        "pairs/other_step_median_s": statistics.median(step.seconds for step in other),
        "pairs/generation_extra_s": statistics.median(
            _generation_s(a) - _generation_s(b) for a, b in zip(own, other, strict=True)
        ),
    }


def _generation_s(step: StepRecord) -> float:
    return step.metrics.get("time/rollout_sample_busy_s", 0.0)


def _median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median of the first members over that of the second."""
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def _spread(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return between which values nine in ten ratios of medians are, when as many pairs are drawn from
    ``pairs`` with replacement (percentile bootstrap). The seed is fixed.
    """
    rng = random.Random(0)
    ratios = sorted(_median_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLED))
    outside = round(_OUTSIDE * _RESAMPLED)
    return ratios[outside], ratios[-1 - outside]


def ratios_of(own: Sequence[StepRecord], other: Sequence[StepRecord]) -> list[float]:
    return [a.seconds / b.seconds for a, b in zip(own, other, strict=True)]
