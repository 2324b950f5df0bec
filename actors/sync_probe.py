"""Engines and policy side by side: what `grpo_dist.loop.sync_probe` asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from ray.exceptions import RayError

from actors.lifecycle.calls import results
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.types import Prompt, Rollout, Sampling, TrainBatch


class Policy(Protocol):
    """`PolicyGroup`, or `ColocatedPolicy`."""

    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]: ...


class EngineProbe:
    """Driver-side handle."""

    def __init__(self, policy: Policy, rollouts: RolloutPool) -> None:
        self._policy, self._rollouts = policy, rollouts

    def engines(self) -> dict[str, Any]:
        """The engines that serve, by name; a replaced one is another object. Raises what ended the role."""
        team = self._rollouts.team
        team.check()
        serving = team.alive()
        return {name: engine for name, engine in team.named().items() if engine in serving}

    async def sample(
        self, engine: Any, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> list[tuple[Rollout, ...]]:
        """Of each of ``prompts`` one completion a seed, all by ``engine``; [] where it is lost. The caller
        holds the deadline.
        """
        try:
            return await results(engine.probe.remote(prompt, list(seeds), sampling) for prompt in prompts)
        except RayError:
            if not await self._rollouts.team.weed_out([engine]):
                raise
            return []

    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]:
        """Name of the policy's dtype, and by row id, float32 [C], its log-probs under the current weights."""
        return await self._policy.logprobs(batch)
