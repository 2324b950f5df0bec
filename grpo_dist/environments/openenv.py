"""Servers of the package openenv-core: each episode is a separate session over one WebSocket.

    environment: openenv:http://localhost:8000
    environment_kwargs: {action: message, observation: echoed_message}

A problem is a seed for `reset`, so the samples of a group start alike if the server honours the seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from openenv import GenericEnvClient

from grpo_dist.environments.base import Environment, Problem, Step

_USUAL = ("prompt", "message", "content", "text", "output", "stdout", "result")


class OpenEnv(Environment):
    """One session of a server.

    Args:
        action: field of the server's action for the text of the policy's action.
        observation: observation field to show; None: the first usual field with text, else all.
        fields: further fields of every action.
        instruction: shown before the first observation.
    """

    target: ClassVar[str]  # address of the server

    def __init__(
        self,
        action: str = "message",
        observation: str | None = None,
        fields: Mapping[str, Any] | None = None,
        instruction: str = "",
    ) -> None:
        self._action, self._observation = action, observation
        self._fields, self._instruction = dict(fields or {}), instruction
        self._client: Any = None

    async def start(self, problem: Problem) -> str:
        self._client = GenericEnvClient(base_url=self.target)
        await self._client.connect()
        first = await self._client.reset(seed=problem.columns["seed"])
        return f"{self._instruction}\n{self._describe(first.observation)}".strip()

    async def step(self, action: str) -> Step:
        answer = await self._client.step({**self._fields, self._action: action})
        reward = None if answer.reward is None else float(answer.reward)
        if answer.done:
            await self.close()
            return Step(reward=reward, done=True)
        return Step(self._describe(answer.observation), reward)

    async def close(self) -> None:
        """End the session: a server allows a limited number of them."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    @classmethod
    def problems(cls, split: str, count: int | None, **kwargs: Any) -> Iterator[Mapping[str, Any]]:
        if count is None:
            raise ValueError("an openenv server has unlimited problems; set `max_rows` of the source")
        first = 0 if split == "train" else 2**30
        for seed in range(first, first + count):
            yield {"problem": f"{cls.target} seed {seed}", "seed": seed}

    def _describe(self, observation: Mapping[str, Any]) -> str:
        if self._observation is not None:
            return str(observation[self._observation])
        usual = (observation.get(name) for name in _USUAL)
        return next((text for text in usual if isinstance(text, str) and text), json.dumps(observation))
