"""Reward model workers: each holds one classifier and scores the samples of one prompt a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.calls import LeastBusy, kill, one_at_a_time, results
from grpo_dist.config import Model, RewardModel
from grpo_dist.rewards.models import Classifier, ModelScores
from grpo_dist.types import Prompt, Rollout
from grpo_dist.usage import Metered, metered


class RewardModelWorker(Metered):
    """One copy of a reward model, and the policy's tokenizer, to say at which token a step ends."""

    def __init__(self, settings: RewardModel, *, policy: Model, policy_dir: str) -> None:
        super().__init__()
        from transformers import AutoTokenizer

        self._classifier = Classifier(settings)
        self._tokenizer = AutoTokenizer.from_pretrained(
            policy_dir, trust_remote_code=policy.trust_remote_code
        )

    def ready(self) -> None:
        """Returns once the model is loaded."""

    @metered("score")
    def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> ModelScores:
        return self._classifier.score(
            prompt.text, [r.text for r in rollouts], [r.completion_ids for r in rollouts], self._tokenizer
        )


class RewardModelPool:
    """Driver-side handle of one reward model: a group goes to the worker with the fewest in hand."""

    def __init__(
        self, settings: RewardModel, *, policy: Model, policy_dir: str, options: dict[str, Any]
    ) -> None:
        actor = one_at_a_time(RewardModelWorker)
        self.name = settings.name
        self.workers = [
            actor.options(name=f"reward-model-{settings.name}-{i}", **options).remote(
                settings, policy=policy, policy_dir=policy_dir
            )
            for i in range(settings.num_workers)
        ]
        self._least_busy = LeastBusy(self.workers)

    async def ready(self) -> None:
        await results(worker.ready.remote() for worker in self.workers)

    async def score(self, prompt: Prompt, rollouts: Any) -> ModelScores:
        """``rollouts`` is an object reference to the samples, or the samples themselves."""
        return await self._least_busy.call("score", prompt, rollouts)

    async def shutdown(self) -> None:
        kill(self.workers)
