"""Prepares batches for the optimiser: the next batch while it works on the current one.

policy      | update on batch k ................. | update on batch k+1 ...
rollouts    | batch k+1 ........ finished |       |
staging                                   | stage |    advantages, padding, rows dealt to ranks and put
                                                       where the ranks fetch them
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from grpo_dist.algorithms.moments import Moments
from grpo_dist.algorithms.schedules import is_due
from grpo_dist.batch.shared_prefixes import needed_tokens
from grpo_dist.batch.token_values import TokenValues, ValuesOfSamples, by_sample, values_of_rows
from grpo_dist.config import Config
from grpo_dist.loop.groups import ScoredBatch
from grpo_dist.loop.metrics import distillation_metrics, rollout_metrics, sampling_cost
from grpo_dist.types import TrainBatch
from grpo_dist.workers import PolicyHandle, StagedRef

if TYPE_CHECKING:  # imports torch; a plan stages no rows
    from torch import Tensor

    from grpo_dist.data.demonstrations import Demonstration


@dataclass(frozen=True, slots=True)
class Staged:
    """A step's optimiser updates, ready for the policy to fetch, and what they were made of."""

    updates: StagedRef  # what `PolicyHandle.stage` returned
    rows: int  # in all updates
    tokens: int  # in these rows; a prompt counts with each of its samples
    needed_tokens: float  # tokens with shared prompts of an update counted once
    loss_tokens: int  # tokens in the loss
    groups_with_signal: frozenset[int]  # groups, by index in the batch, that the update learns from
    source: ScoredBatch
    kl_coef: float | None  # weight of the KL term inside the advantages; None: the KL is in the loss
    values: Mapping[int, TokenValues] | None  # by row id; None: samples are not recorded
    tokens_recorded: bool  # ``values`` get the policy's log-probs
    rewards: Moments  # over all steps up to this one
    demonstrations: Sequence[str]  # uids of the step's demonstrations
    metrics: dict[str, float]  # about samples, rewards and teachers


async def recorded_values(staged: Staged, policy: PolicyHandle, *, trained: bool) -> ValuesOfSamples | None:
    """Return per-token values of the samples of ``staged``; None if samples are not recorded.

    ``trained``: ``policy`` has just been updated on them, and knows their log-probs.
    """
    if staged.values is None:
        return None
    logprobs = await policy.token_logprobs() if trained and staged.tokens_recorded else {}
    return await asyncio.to_thread(by_sample, staged.source.groups, staged.values, logprobs)


class Staging:
    """Stages a batch in `take`, or ahead of it after `begin`, with the same numbers.

    ``rewards``: reward moments of all steps taken so far. A step staged ahead counts once it is taken.
    ``demonstrations``: the run's.
    """

    def __init__(
        self,
        config: Config,
        policy: PolicyHandle,
        rewards: Moments,
        demonstrations: Sequence[Demonstration] = (),
    ) -> None:
        self._config, self._policy, self._demonstrations = config, policy, demonstrations
        self.rewards = rewards
        self._reads_policy = any(estimator.traits.reads_policy for estimator in config.estimators)
        self._ahead: asyncio.Task[Staged | None] | None = None

    def begin(self, step: int, sampling: asyncio.Task[ScoredBatch] | None) -> None:
        """Stage the batch of ``step`` in the background as soon as ``sampling`` is done.

        Does nothing if the update in progress may change what the batch depends on: the KL weight inside the
        advantages, the reference, or the policy itself.
        """
        algorithm = self._config.algorithm
        steered = algorithm.kl.in_reward and algorithm.kl.target is not None
        every = self._config.reference.refresh_every if self._config.needs_reference else 0
        moves = steered or self._reads_policy
        if sampling is not None and not moves and not (every and step % every == 0):
            self._ahead = asyncio.create_task(self._follow(step, sampling), name=f"stage {step}")

    async def take(self, step: int, batch: ScoredBatch, *, kl_coef: float) -> Staged:
        """Return ``batch`` ready for the update of ``step`` with this weight of the KL term."""
        ahead, self._ahead = self._ahead, None
        staged = await ahead if ahead is not None else None
        if staged is None or staged.source is not batch or staged.kl_coef != self._inside(kl_coef):
            norms = await self._score_norms(batch)
            staged = await asyncio.to_thread(self._stage, step, batch, kl_coef, norms)
        self.rewards = staged.rewards
        return staged

    async def _follow(self, step: int, sampling: asyncio.Task[ScoredBatch]) -> Staged | None:
        """Return None if sampling failed: `Pipeline.next` raises its error."""
        await asyncio.wait([sampling])  # bounded: by the deadline that `Pipeline.next` has for it
        if sampling.cancelled() or sampling.exception() is not None:
            return None
        batch = sampling.result()  # bounded: it is done
        return await asyncio.to_thread(self._stage, step, batch, self._config.algorithm.kl.coef)

    async def _score_norms(self, batch: ScoredBatch) -> Tensor | None:
        """Return the score norms if an estimator reads them; else None, as for the caller's advantages."""
        if batch.advantages is not None or not self._reads_policy:
            return None
        from grpo_dist.loop.updates import score_norms_of

        return await score_norms_of(self._policy, batch.groups)

    def _stage(
        self, step: int, batch: ScoredBatch, kl_coef: float, score_norms: Tensor | None = None
    ) -> Staged:
        """Stage in a thread, so that the loop keeps admitting and receiving groups."""
        from grpo_dist.batch.rows import select_update
        from grpo_dist.loop.updates import make_updates, reward_moments, step_demonstrations

        config, tracking = self._config, self._config.tracking
        rewards = reward_moments(config.algorithm, batch.scored, self.rewards)
        chosen = step_demonstrations(config.demonstrations, self._demonstrations, config.seed, step)
        updates, later_epochs = make_updates(
            config,
            batch.scored,
            step,
            kl_coef=kl_coef,
            moments=rewards,
            advantages=batch.advantages,
            demonstrations=chosen,
            score_norms=score_norms,
        )
        counted = [update.drop_candidates() for update in updates]
        later = [select_update(counted, update) for epoch in later_epochs for update in epoch]
        with_signal = frozenset(chain.from_iterable(map(_groups_with_signal, updates)))
        tokens_recorded = tracking.samples and is_due(step + 1, tracking.token_values_every)
        values = values_of_rows(updates, tokens=tokens_recorded) if tracking.samples else None
        metrics = rollout_metrics(batch.sampled, step, config.data.pools_by)
        metrics |= distillation_metrics(batch.scored, with_signal)
        metrics |= sampling_cost(batch.groups, batch.discarded, with_signal)
        return Staged(
            updates=self._policy.stage(updates, keep_logprobs=tokens_recorded, later_epochs=later_epochs),
            rows=sum(map(len, updates)),
            tokens=sum(int(update.lengths.sum()) for update in updates),
            needed_tokens=needed_tokens([*updates, *later]),
            loss_tokens=sum(map(_trained_tokens, updates)),
            groups_with_signal=with_signal,
            source=batch,
            kl_coef=self._inside(kl_coef),
            values=values,
            tokens_recorded=tokens_recorded,
            rewards=rewards,
            demonstrations=[demonstration.uid for demonstration in chosen],
            metrics=metrics,
        )

    def _inside(self, kl_coef: float) -> float | None:
        """Return the weight if the KL is in the advantages; else None: the update takes it as an argument."""
        return kl_coef if self._config.algorithm.kl.in_reward else None


def _trained_tokens(update: TrainBatch) -> int:
    """Count the tokens of all streams of the update, each once. Rows skipped as idle count too."""
    teacher, sizes = update.teacher, update.denominators
    taught_only = 0 if teacher is None else int((teacher.mask & ~update.policy.mask).sum())
    return round(sizes.tokens + sizes.demonstrated) + taught_only


def _groups_with_signal(update: TrainBatch) -> list[int]:
    from grpo_dist.loop.updates import learning_rows

    groups: list[int] = update.group_ids.numpy()[learning_rows(update)].tolist()
    return groups
