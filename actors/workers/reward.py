"""Reward workers: each owns a pool of killable grader processes, and turns samples and reward-model scores
into a scored Group. Reward models have separate workers, which hold one classifier each.

    samples --> reward models --> reward worker: functions, weights, gates --> Group
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray

from actors.lifecycle.calls import LOST, Probeable, end, one_at_a_time, reason
from actors.lifecycle.team import ActorSpec, FrozenPool, Team
from actors.workers.exchange import (
    Line,
    ScoringActor,
    StoredSamples,
    as_arguments,
    from_arguments,
    submit,
)
from grpo_dist.chat.template import read_tokenizer
from grpo_dist.config import ModelConfig, RewardModelConfig, RewardsConfig
from grpo_dist.config.rewards import ProcessRewardConfig
from grpo_dist.errors import expanded, failure_kind
from grpo_dist.rewards.format import is_degenerate
from grpo_dist.rewards.group import CompletionGroup, ModelScores, decoded_length, token_ends
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import StepScores
from grpo_dist.rewards.scorer import scorers_by_source
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.model_files import check_on_node
from grpo_dist.runtime.processes import freeze_loaded
from grpo_dist.types import Group, PackedSamples, Prompt, Rollout


class RewardModelWorker(Metered, Probeable):
    """Holds a copy of a reward model, and the policy's tokenizer to locate the last token of each step."""

    def __init__(self, settings: RewardModelConfig, *, policy: ModelConfig, policy_dir: str) -> None:
        super().__init__()
        self._settings, self._policy, self._policy_dir = settings, policy, policy_dir
        self._classifier: Any = None
        self._tokenizer: Any = None

    def ready(self) -> None:
        """Load the model. Raises ValueError if this node lacks it or the policy's tokenizer, and UserError
        like `check_gpus`.
        """
        from actors.placement.own_gpus import check_gpus  # imports torch, which the handle does not need

        check_gpus()
        if (path := expanded(self._settings.path)).is_absolute():  # else each node downloads from the hub
            check_on_node(path)
        policy = PolicyTokenizer(self._policy_dir, self._policy.trust_remote_code)
        self._tokenizer = load_tokenizer(policy)
        from grpo_dist.rewards.model_ranks import load_classifier  # imports torch

        self._classifier = load_classifier(self._settings)
        freeze_loaded()  # because `sleep` collects garbage

    def sleep(self) -> None:
        """Move the model to host memory."""
        self._classifier.sleep()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self._classifier.wake_up()

    @metered("score")
    def score(self, prompt: Prompt, samples: Any, *stored: PackedSamples) -> ModelScores:
        rollouts = from_arguments(samples, stored)
        scores: ModelScores = self._classifier.score(
            prompt.text, [r.text for r in rollouts], [r.completion_ids for r in rollouts], self._tokenizer
        )
        return scores


class RewardModelPool(FrozenPool):
    """Driver-side handle of a reward model: sends each group to the worker with the fewest running calls."""

    def __init__(
        self,
        settings: RewardModelConfig,
        actors: ActorSpec,
        *,
        policy: ModelConfig,
        policy_dir: str,
    ) -> None:
        self.name, actor = settings.name, one_at_a_time(RewardModelWorker)
        makers = actors.makers(actor, settings.num_workers, settings, policy=policy, policy_dir=policy_dir)
        super().__init__(Team(f"reward-model-{settings.name}", makers, actors))

    async def score(self, prompt: Prompt, rollouts: Any) -> ModelScores:
        """Score the samples of a prompt. ``rollouts``: the samples, or `StoredSamples`."""
        (samples,), stored = as_arguments([rollouts])
        async with self.turn():
            return await self.team.call("score", prompt, samples, *stored)


logger = logging.getLogger("grpo_dist")

# A group counts as not scored after this many lost actors. Another group may have killed the first actor, but
# the second scores nothing else, see `Team.send`.
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class PolicyTokenizer:
    """Location of the policy's tokenizer."""

    directory: str
    trust_remote_code: bool


class RewardWorker(ScoringActor, Metered, Probeable):
    """Scores several groups at once, which share its grader processes."""

    def __init__(
        self,
        settings: RewardsConfig,
        *,
        max_new_tokens: int,
        max_length: int | None = None,
        outcome_rewards: Mapping[Any, float] | None = None,
        policy: PolicyTokenizer | None = None,
    ) -> None:
        self._max_new_tokens, self._max_length, self._settings = max_new_tokens, max_length, settings
        self._tokenizer = load_tokenizer(policy) if policy and scores_own_steps(settings) else None
        self._pool = GraderPool.from_config(settings)
        self._scorers = scorers_by_source(
            settings.variants, self._pool, workers=settings.num_workers, outcome_rewards=outcome_rewards
        )
        waiting = sum(scorer.max_concurrency for scorer in self._scorers.values())
        super().__init__(threads=2 * settings.processes_per_worker + waiting)

    def ready(self) -> None:
        """Return once the grader processes are ready."""

    @metered("score")
    def score(
        self, prompt: Prompt, rollouts: Sequence[Rollout], modelled: Mapping[str, ModelScores]
    ) -> tuple[Group, tuple[str, ...]]:
        """Return the group, and new reasons why samples could not be scored, for the driver's log.

        ``modelled``: the scores of each reward model; ``score_s`` excludes their time.
        """
        begin = time.perf_counter()
        completions = CompletionGroup.from_rollouts(
            prompt,
            rollouts,
            max_new_tokens=self._max_new_tokens,
            max_length=self._max_length,
            settings=self._settings,
        )
        scorer = self._scorers.get(prompt.source, self._scorers[""])
        scores = scorer.score(completions, {name: m.rewards for name, m in modelled.items()})
        group = Group(
            prompt,
            tuple(rollouts),
            scores.rewards,
            scores.parts,
            tuple(scores.outcomes),
            failures=scores.failures,
        )
        if scores.steps is not None and self._tokenizer is not None:
            group = add_function_steps(group, scores.steps, self._tokenizer)
        degenerate = sum(is_degenerate(rollout.text) for rollout in rollouts)
        group = replace(
            add_model_steps(group, modelled), degenerate=degenerate, score_s=time.perf_counter() - begin
        )
        return group, scorer.news()

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        for scorer in self._scorers.values():
            scorer.close()
        self._pool.close()


class RewardPool:
    """Driver-side handle: calls the reward models, then the reward worker with the fewest calls in flight.

    ``models``: shut down with it, but loaded separately.
    """

    def __init__(
        self,
        settings: RewardsConfig,
        actors: ActorSpec,
        *,
        max_new_tokens: int,
        max_length: int | None = None,
        models: Sequence[RewardModelPool] = (),
        worker: type = RewardWorker,
        outcome_rewards: Mapping[Any, float] | None = None,
        policy: PolicyTokenizer | None = None,
    ) -> None:
        makers = actors.makers(
            ray.remote(worker),
            settings.num_workers,
            settings,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            outcome_rewards=outcome_rewards,
            policy=policy,
        )
        self.team = Team("reward", makers, actors, health=lambda worker: worker.health.remote())
        self.workers = self.team.workers
        self._lines: dict[Any, Line] = {}  # by worker
        self._settings = settings
        self.models = list(models)
        self._logged: set[str] = set()

    async def ready(self) -> None:
        await self.team.ready()

    async def score(self, prompt: Prompt, rollouts: Any) -> Group:
        """Score a group. ``rollouts``: the samples, or `StoredSamples`.

        If two workers are lost during the call, the group counts as not scored. Raises SamplesLost if its
        samples are lost, too.
        """
        models = [model for model in self.models if self._uses_model(model.name, prompt.source)]
        model_scores = await gather(model.score(prompt, rollouts) for model in models) if models else []
        modelled = {model.name: scores for model, scores in zip(models, model_scores, strict=True)}
        request = prompt, rollouts, modelled
        try:
            scores, news = await self.team.send(lambda w: self._line(w).ask(request), attempts=_ATTEMPTS)
        except LOST as error:
            news = (f"reward: {_ATTEMPTS} workers were lost over prompt {prompt.uid} ({reason(error)})",)
            scores = None
        samples = await rollouts if isinstance(rollouts, StoredSamples) else rollouts
        if scores is None:
            group = add_model_steps(not_scored(prompt, samples, self._settings), modelled)
            group = replace(group, failures=(news,) * len(samples))
        else:
            group = Group.from_scores(prompt, samples, scores)
        for detail in news:
            if (kind := failure_kind(detail)) not in self._logged:
                self._logged.add(kind)
                logger.warning("%s; unscored samples are excluded", detail)
        return group

    def _line(self, worker: Any) -> Line:
        if (line := self._lines.get(worker)) is None:
            line = Line(lambda requests: submit(worker, requests), worker.collect.remote)
            self._lines[worker] = line
        return line

    def _uses_model(self, model: str, source: str) -> bool:
        variant = self._settings.by_source.get(source)
        return variant is None or model in variant.models

    async def shutdown(self) -> None:
        for line in self._lines.values():
            line.close()
        await self.team.shutdown()
        await gather([end(self.workers), *(model.shutdown() for model in self.models)])


def scores_own_steps(settings: RewardsConfig) -> bool:
    """Return whether a user-supplied function rewards steps, whose ends need the policy's tokenizer."""
    return any(isinstance(function, ProcessRewardConfig) for function in settings.all_functions)


def load_tokenizer(policy: PolicyTokenizer) -> Any:
    check_on_node(policy.directory)
    return read_tokenizer(policy.directory, trust_remote_code=policy.trust_remote_code)


def add_function_steps(group: Group, steps: StepScores, tokenizer: Any) -> Group:
    """Add a function's step rewards, and the policy tokens at which the steps end."""
    ends = [
        token_ends(char_ends, len(r.completion_ids), decoded_length(tokenizer, r.completion_ids))
        for r, char_ends in zip(group.rollouts, steps.char_ends, strict=True)
    ]
    return replace(group, step_rewards=steps.rewards, step_ends=tuple(ends))


def add_model_steps(group: Group, modelled: Mapping[str, ModelScores]) -> Group:
    """Add the step rewards of a process model to ``group``; the configuration allows one such model."""
    steps = next((m for m in modelled.values() if m.step_rewards is not None), None)
    return replace(group, step_rewards=steps.step_rewards, step_ends=steps.step_ends) if steps else group


def not_scored(prompt: Prompt, rollouts: Sequence[Rollout], settings: RewardsConfig) -> Group:
    """Return a group of unscored samples: NaN rewards, and outcome "error" if math or a judge has one."""
    settings = settings.select_source(prompt.source)
    nan_rewards = np.full(len(rollouts), np.nan, np.float32)
    names = [reward.label for reward in (*settings.functions, *settings.models)]
    outcome = "error" if any(f.function in ("math", "judge") for f in settings.functions) else ""
    parts = dict.fromkeys(names, nan_rewards)
    return Group(prompt, tuple(rollouts), nan_rewards, parts, (outcome,) * len(rollouts))
