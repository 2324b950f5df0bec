"""Forced completion lengths, so that random weights can have any distribution of lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_dist.config import FixedLengths, LengthsConfig, NaturalLengths
from grpo_dist.types import Prompt, Sampling
from grpo_dist.workers import RolloutHandle, RolloutsRef


def length_of(seed: int, lengths: LengthsConfig, *, cap: int, uid: str = "") -> int | None:
    """Tokens of the request with this ``seed`` for the prompt ``uid``, 1 to ``cap``; None: where the model
    ends.

    A log-normal of mean m and deviation s of its logarithm is exp(N(ln m - s^2 / 2, s)). A share r of the
    variance is the prompt's: N = ln m - s^2 / 2 + s (sqrt(r) z_prompt + sqrt(1 - r) z_request).
    """
    if isinstance(lengths, NaturalLengths):
        return None
    if isinstance(lengths, FixedLengths):
        return lengths.tokens or cap
    sigma = lengths.sigma
    middle, share = math.log(lengths.mean) - sigma**2 / 2, lengths.prompt_share or 0.0
    if share:
        middle += math.sqrt(share) * random.Random(f"length of {uid}").gauss(0.0, sigma)
        sigma *= math.sqrt(1.0 - share)
    length = random.Random(f"length {seed}").lognormvariate(middle, sigma)
    return min(max(round(length), 1), cap)


class ForcedLengths:
    """``rollouts`` whose requests get lengths by their seeds, so the order of requests does not matter."""

    def __init__(self, rollouts: RolloutHandle, lengths: LengthsConfig) -> None:
        self._rollouts, self._lengths = rollouts, lengths

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef:
        cap = sampling.max_new_tokens
        lengths: list[Any] = [length_of(seed, self._lengths, cap=cap, uid=prompt.uid) for seed in seeds]
        forced = sampling if None in lengths else replace(sampling, lengths=tuple(lengths))
        return await self._rollouts.sample(prompt, seeds=seeds, sampling=forced)

    async def abandon(self) -> None:
        await self._rollouts.abandon()
