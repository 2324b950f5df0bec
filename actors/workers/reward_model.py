"""Reward model workers: each holds one classifier, and scores the samples of one prompt a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.lifecycle.actor_spec import ActorSpec
from actors.lifecycle.calls import kill, one_at_a_time
from actors.lifecycle.probe import Probeable
from actors.lifecycle.supervisor import Team
from grpo_dist.config import ModelConfig, RewardModelConfig
from grpo_dist.rewards.group import ModelScores
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.types import Prompt, Rollout


class RewardModelWorker(Metered, Probeable):
    """Holds a copy of a reward model, and the policy's tokenizer, which locates the last token of a step."""

    def __init__(self, settings: RewardModelConfig, *, policy: ModelConfig, policy_dir: str) -> None:
        super().__init__()
        from transformers import AutoTokenizer

        from grpo_dist.rewards.models import Classifier  # torch, which the driver's handle does without

        self._classifier = Classifier(settings)
        self._tokenizer = AutoTokenizer.from_pretrained(
            policy_dir, trust_remote_code=policy.trust_remote_code
        )

    def ready(self) -> None:
        """Return once the model is loaded."""

    @metered("score")
    def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> ModelScores:
        return self._classifier.score(
            prompt.text, [r.text for r in rollouts], [r.completion_ids for r in rollouts], self._tokenizer
        )


class RewardModelPool:
    """Driver-side handle of one reward model: sends each group to the worker with the fewest calls in
    flight.
    """

    def __init__(
        self,
        settings: RewardModelConfig,
        actors: ActorSpec,
        *,
        policy: ModelConfig,
        policy_dir: str,
    ) -> None:
        self.name, actor = settings.name, one_at_a_time(RewardModelWorker)
        made = actors.makers(actor, settings.num_workers, settings, policy=policy, policy_dir=policy_dir)
        self.team = Team(f"reward-model-{settings.name}", made, actors)
        self.workers = self.team.workers

    async def ready(self) -> None:
        await self.team.ready()

    async def score(self, prompt: Prompt, rollouts: Any) -> ModelScores:
        """Score the samples of a prompt. ``rollouts``: the samples, or an object reference to them."""
        return await self.team.call("score", prompt, rollouts)

    async def shutdown(self) -> None:
        await self.team.shutdown()
        kill(self.workers)
