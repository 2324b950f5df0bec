"""Reward workers: each owns a pool of killable grader processes and turns sampled completions into a scored
Group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from actors.calls import LeastBusy, end, results
from grpo_dist.config import Rewards
from grpo_dist.rewards.answers import Answers
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import Scorer, reward_specs
from grpo_dist.types import Group, Prompt, Rollout


class RewardWorker:
    """Scores one group a call; several calls may be in it at once and share its grader processes."""

    def __init__(self, settings: Rewards, *, max_new_tokens: int) -> None:
        self._max_new_tokens = max_new_tokens
        self._pool = GraderPool(
            settings.processes_per_worker,
            timeout_s=settings.timeout_s,
            memory_mb=settings.memory_mb,
            code_paths=settings.code_paths,
        )
        self._scorer = Scorer(reward_specs(settings), self._pool, workers=settings.num_workers)

    def ready(self) -> None:
        """Returns once the grader processes are up."""

    def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Group:
        begin = time.perf_counter()
        scores = self._scorer.score(Answers.of(prompt, rollouts, max_new_tokens=self._max_new_tokens))
        return Group(
            prompt=prompt,
            rollouts=tuple(rollouts),
            rewards=scores.rewards,
            reward_parts=scores.parts,
            outcomes=tuple(scores.outcomes),
            score_s=time.perf_counter() - begin,
        )

    def close(self) -> None:
        self._scorer.close()
        self._pool.close()


class RewardPool:
    """Driver-side handle: ``score`` sends each group to the worker with the fewest in hand."""

    def __init__(self, settings: Rewards, *, max_new_tokens: int, options: dict[str, Any]) -> None:
        actor = ray.remote(RewardWorker)
        in_hand = 2 * settings.processes_per_worker
        self._workers = [
            actor.options(name=f"reward-{i}", max_concurrency=in_hand, **options).remote(
                settings, max_new_tokens=max_new_tokens
            )
            for i in range(settings.num_workers)
        ]
        self._least_busy = LeastBusy(self._workers)

    async def ready(self) -> None:
        await results(worker.ready.remote() for worker in self._workers)

    async def score(self, prompt: Prompt, rollouts: Any) -> Group:
        """``rollouts`` is an object reference to the samples, or the samples themselves."""
        return await self._least_busy.call("score", prompt, rollouts)

    async def shutdown(self) -> None:
        await end(self._workers)
