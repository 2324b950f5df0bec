"""An environment for benchmarks: it waits, and answers with a fixed number of characters."""

import asyncio
import math
import random

from grpo_dist.environments.base import Environment, Step


class SlowTool(Environment):
    """Answer so many actions, each after a log-normal time with this mean and this deviation of its log."""

    def __init__(self, turns: int = 3, seconds: float = 0.2, sigma: float = 1.0) -> None:
        self._turns, self._seconds, self._sigma = turns, seconds, sigma
        self._done = 0

    async def step(self, action: str) -> Step:
        if self._seconds:
            drawn = random.Random(f"{self._done} {action}")
            mean = math.log(self._seconds) - self._sigma**2 / 2
            await asyncio.sleep(drawn.lognormvariate(mean, self._sigma))
        self._done += 1
        if self._done == self._turns:
            return Step(done=True)
        return Step("the answer of a tool")
