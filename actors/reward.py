"""Reward workers: each owns a pool of killable grader processes and turns sampled completions into a scored
Group, together with what the reward models say.

    samples --> reward models (actors of their own) --> reward worker: functions, weights, gates --> Group
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from actors.calls import LeastBusy, end, results
from actors.reward_model import RewardModelPool
from grpo_dist.concurrency import gather
from grpo_dist.config import Rewards
from grpo_dist.rewards.answers import Answers
from grpo_dist.rewards.models import ModelScores
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import Scorer, model_terms, placed, reward_specs
from grpo_dist.types import Group, Prompt, Rollout
from grpo_dist.usage import Metered, metered

logger = logging.getLogger(__name__)


class RewardWorker(Metered):
    """Scores one group a call; several calls may be in it at once and share its grader processes."""

    def __init__(self, settings: Rewards, *, max_new_tokens: int) -> None:
        super().__init__()
        self._max_new_tokens = max_new_tokens
        self._pool = GraderPool(
            settings.processes_per_worker,
            timeout_s=settings.timeout_s,
            memory_mb=settings.memory_mb,
            code_paths=settings.code_paths,
        )
        self._scorer = Scorer(
            reward_specs(settings), self._pool, models=model_terms(settings), workers=settings.num_workers
        )

    def ready(self) -> None:
        """Returns once the grader processes are up."""

    @metered("score")
    def score(
        self, prompt: Prompt, rollouts: Sequence[Rollout], modelled: Mapping[str, ModelScores]
    ) -> tuple[Group, tuple[str, ...]]:
        """The group, and what is new of why samples cannot be scored: nobody reads an actor's log.

        ``modelled``: what each reward model says of the samples; ``score_s`` is without their time.
        """
        begin = time.perf_counter()
        answers = Answers.of(prompt, rollouts, max_new_tokens=self._max_new_tokens)
        scores = self._scorer.score(answers, {name: m.rewards for name, m in modelled.items()})
        # At most one of them is a process model; the configuration saw to that.
        steps = next((m for m in modelled.values() if m.step_rewards is not None), None)
        group = Group(
            prompt=prompt,
            rollouts=tuple(rollouts),
            rewards=scores.rewards,
            reward_parts=scores.parts,
            outcomes=tuple(scores.outcomes),
            score_s=time.perf_counter() - begin,
            step_rewards=steps.step_rewards if steps else None,
            step_ends=steps.step_ends if steps else None,
        )
        return group, self._scorer.news()

    def close(self) -> None:
        self._scorer.close()
        self._pool.close()


class RewardPool:
    """Driver-side handle: ``score`` asks the reward models, then the reward worker with the fewest in hand.

    ``models`` are its own: they start and end with it.
    """

    def __init__(
        self,
        settings: Rewards,
        *,
        max_new_tokens: int,
        models: Sequence[RewardModelPool] = (),
        options: dict[str, Any],
        worker: type = RewardWorker,
    ) -> None:
        actor, settings = ray.remote(worker), placed(settings)
        in_hand = 2 * settings.processes_per_worker
        self.workers = [
            actor.options(name=f"reward-{i}", max_concurrency=in_hand, **options).remote(
                settings, max_new_tokens=max_new_tokens
            )
            for i in range(settings.num_workers)
        ]
        self._least_busy = LeastBusy(self.workers)
        self.models = list(models)
        self._told: set[str] = set()

    async def ready(self) -> None:
        await gather(
            [results(worker.ready.remote() for worker in self.workers), *(m.ready() for m in self.models)]
        )

    async def score(self, prompt: Prompt, rollouts: Any) -> Group:
        """``rollouts`` is an object reference to the samples, or the samples themselves."""
        scores = await gather(model.score(prompt, rollouts) for model in self.models)
        modelled = {model.name: own for model, own in zip(self.models, scores, strict=True)}
        group, news = await self._least_busy.call("score", prompt, rollouts, modelled)
        for reason in news:
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("%s; a sample without a score counts as not scored", reason)
        return group

    async def shutdown(self) -> None:
        await gather([end(self.workers), *(model.shutdown() for model in self.models)])
