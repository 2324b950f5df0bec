"""What `grpo_dist.loop.sync_probe` asks of engines and policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayError

from actors.evaluation_engines import EvaluationEngines, serving
from actors.lifecycle.calls import results
from actors.workers.policy_group import PolicyGroup
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.types import Prompt, Rollout, Sampling, TrainBatch


class EngineProbe:
    """Samples on one engine at a time, and computes the policy's log-probs of the samples."""

    def __init__(
        self, policy: PolicyGroup, rollouts: RolloutPool, evaluation: EvaluationEngines | None = None
    ) -> None:
        self._policy, self._rollouts, self._evaluation = policy, rollouts, evaluation

    def engines(self, version: int) -> dict[str, Any]:
        """Return the serving engines that hold ``version`` by name; a replacement is another object. Raises
        the error that ended the role.
        """
        return self._training_engines() | dict(serving(self._evaluation, version))

    def _training_engines(self) -> dict[str, Any]:
        team = self._rollouts.team
        team.check()
        serve = team.alive()
        return {name: engine for name, engine in team.named().items() if engine in serve}

    async def sample(
        self, engine: Any, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> list[tuple[Rollout, ...]]:
        """Sample one completion a seed for each of ``prompts`` on ``engine``; return [] if it is lost.

        The caller holds the deadline.
        """
        pool = self._rollouts
        if self._evaluation is not None and engine in self._evaluation.rollouts.workers:
            pool = self._evaluation.rollouts
            await self._evaluation.loaded()
        try:
            async with pool.turn():
                return await results(engine.probe.remote(prompt, list(seeds), sampling) for prompt in prompts)
        except RayError:
            if not await pool.team.find_dead([engine]):
                raise
            return []

    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]:
        """Return the name of the policy's dtype and, by row id, its current log-probs, float32 [C]."""
        return await self._policy.logprobs(batch)
