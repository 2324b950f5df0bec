"""An environment for benchmarks: it waits, and answers with a fixed number of characters."""

import asyncio
import math
import random

from grpo_dist.environments.base import Environment, Step


class SlowTool(Environment):
    """Answer so many actions, each after a log-normal time with this mean and this deviation of its log.

    ``last_seconds``: the mean for the last action, which no other follows; None: ``seconds``.
    """

    def __init__(
        self, turns: int = 3, seconds: float = 0.2, sigma: float = 1.0, last_seconds: float | None = None
    ) -> None:
        self._turns, self._seconds, self._sigma = turns, seconds, sigma
        self._last_seconds = seconds if last_seconds is None else last_seconds
        self._done = 0

    async def step(self, action: str) -> Step:
        is_last = self._done + 1 == self._turns
        if seconds := self._last_seconds if is_last else self._seconds:
            drawn = random.Random(f"{self._done} {action}")
            mean = math.log(seconds) - self._sigma**2 / 2
            await asyncio.sleep(drawn.lognormvariate(mean, self._sigma))
        self._done += 1
        return Step(done=True) if is_last else Step("the answer of a tool")
