"""Forced completion lengths, so that random weights can have any distribution of lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_dist.config import LengthsConfig
from grpo_dist.types import Prompt, Sampling
from grpo_dist.workers import RolloutHandle, RolloutsRef


def length_of(seed: int, lengths: LengthsConfig, *, cap: int) -> int | None:
    """Tokens of the request with this ``seed``, 1 to ``cap``; None: where the model ends.

    A log-normal of mean m and deviation s of its logarithm is exp(N(ln m - s^2 / 2, s)).
    """
    if lengths.kind == "natural":
        return None
    if lengths.kind == "fixed":
        return lengths.tokens or cap
    assert lengths.mean is not None  # the configuration checks it
    sigma = lengths.sigma or 1.0
    drawn = random.Random(f"length {seed}").lognormvariate(math.log(lengths.mean) - sigma**2 / 2, sigma)
    return min(max(round(drawn), 1), cap)


class ForcedLengths:
    """``rollouts`` whose requests get lengths by their seeds, so the order of requests does not matter."""

    def __init__(self, rollouts: RolloutHandle, lengths: LengthsConfig) -> None:
        self._rollouts, self._lengths = rollouts, lengths

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef:
        drawn: list[Any] = [length_of(seed, self._lengths, cap=sampling.max_new_tokens) for seed in seeds]
        forced = sampling if None in drawn else replace(sampling, lengths=tuple(drawn))
        return await self._rollouts.sample(prompt, seeds=seeds, sampling=forced)

    async def abandon(self) -> None:
        await self._rollouts.abandon()
