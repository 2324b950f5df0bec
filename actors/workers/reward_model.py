"""Reward model workers: each holds one classifier, and scores the samples of one prompt a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from actors.lifecycle.actor_spec import ActorSpec
from actors.lifecycle.calls import kill, one_at_a_time, results
from actors.lifecycle.probe import Probeable
from actors.lifecycle.supervisor import Team
from grpo_dist.config import ModelConfig, RewardModelConfig
from grpo_dist.errors import expanded
from grpo_dist.rewards.group import ModelScores
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.model_files import check_on_node
from grpo_dist.runtime.processes import freeze_loaded
from grpo_dist.types import Prompt, Rollout


class RewardModelWorker(Metered, Probeable):
    """Holds a copy of a reward model, and the policy's tokenizer, which locates the last token of a step."""

    def __init__(self, settings: RewardModelConfig, *, policy: ModelConfig, policy_dir: str) -> None:
        super().__init__()
        self._settings, self._policy, self._policy_dir = settings, policy, policy_dir
        self._classifier: Any = None
        self._tokenizer: Any = None

    def ready(self) -> None:
        """Load the model. Raises ValueError where this node does not have it, or the policy's tokenizer, and
        UserError as `check_gpus`.
        """
        from actors.placement.own_gpus import check_gpus  # torch, which the handle does without

        check_gpus()
        check_on_node(self._policy_dir)
        if (own := expanded(self._settings.path)).is_absolute():  # else each node asks the hub
            check_on_node(own)
        from transformers import AutoTokenizer

        from grpo_dist.rewards.model_ranks import classifier_of  # torch, as above

        self._classifier = classifier_of(self._settings)
        self._tokenizer = AutoTokenizer.from_pretrained(
            self._policy_dir, trust_remote_code=self._policy.trust_remote_code
        )
        freeze_loaded()  # `sleep` collects garbage

    def sleep(self) -> None:
        """Move the model to host memory."""
        self._classifier.sleep()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self._classifier.wake_up()

    @metered("score")
    def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> ModelScores:
        scores: ModelScores = self._classifier.score(
            prompt.text, [r.text for r in rollouts], [r.completion_ids for r in rollouts], self._tokenizer
        )
        return scores


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
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # see `Colocation`

    async def ready(self) -> None:
        await self.team.ready()

    async def sleep(self) -> None:
        """Free the GPUs; the caller holds the deadline."""
        await results(worker.sleep.remote() for worker in self.workers)

    async def wake_up(self) -> None:
        """Undo `sleep`."""
        await results(worker.wake_up.remote() for worker in self.workers)

    async def score(self, prompt: Prompt, rollouts: Any) -> ModelScores:
        """Score the samples of a prompt. ``rollouts``: the samples, or an object reference to them."""
        async with self.turn():
            return await self.team.call("score", prompt, rollouts)

    async def shutdown(self) -> None:
        await self.team.shutdown()
        kill(self.workers)
