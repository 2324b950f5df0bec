"""A custom environment, as a user would write it."""

import asyncio

from grpo_dist.environments.base import Environment, Step


class Digits(Environment):
    """Answers each of ``turns`` actions with its number of digits; the last one ends the episode."""

    def __init__(self, turns=3, seconds=0.0):
        self._left, self._seconds = turns, seconds

    async def step(self, action):
        await asyncio.sleep(self._seconds)
        self._left -= 1
        digits = sum(letter.isdigit() for letter in action)
        share = digits / max(len(action), 1)
        return Step(None if self._left == 0 else f"{digits} digits", reward=share, done=self._left == 0)
