"""One group at a time: sampled, scored, and given its reference log-probs.

rollouts    | sample | greedy sample (ReMax)
rewards              | score
reference            | log-probs              as soon as the samples are there, at the same time as the score
teachers             | log-probs              those that teach the prompt's source
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from grpo_dist.algorithms.estimators import estimator_of
from grpo_dist.config import AlgorithmConfig, BatchConfig, DataConfig
from grpo_dist.errors import SamplesFailed, cause_of
from grpo_dist.loop.frozen_models import FrozenModels
from grpo_dist.loop.progress import SampledBatch
from grpo_dist.loop.refill import Refill
from grpo_dist.runtime.concurrency import gather, sampled_again
from grpo_dist.runtime.seeds import request_seed, request_seeds
from grpo_dist.types import Group, Prompt, Rollout, Sampling, TeacherLogprobs
from grpo_dist.workers import RolloutsRef, Workers

logger = logging.getLogger("grpo_dist")

T = TypeVar("T")

_DRAWS = 3  # of a group whose samples fail: once may be bad luck


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group ready to train on. ``ref_logprobs``: float32 [C] for each row of each sample; empty
    without a KL term. ``teacher_logprobs``: for each row what each of its teachers gives, by name.
    """

    group: Group
    ref_logprobs: list[np.ndarray]
    teacher_logprobs: Mapping[str, list[TeacherLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The groups that one step trains on, and those that dynamic sampling discarded.

    ``advantages``: float32 [G] of each group, from a caller with its own estimator; None: the configured one.
    ``metrics``: of how the batch was put together.
    """

    scored: list[ScoredGroup]
    discarded: list[Group] = field(default_factory=list)
    advantages: Sequence[np.ndarray] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        """Those to train on."""
        return [s.group for s in self.scored]

    @property
    def sampled(self) -> list[Group]:
        """Those to train on, and those discarded."""
        return self.groups + self.discarded

    def without_reference(self) -> SampledBatch:
        return SampledBatch(self.groups, self.discarded)


@dataclass(frozen=True, slots=True)
class GroupDraw:
    """What is sampled of each prompt.

    Attributes:
        samples: of a group.
        least: so many suffice where the engines cannot give the others; with fewer the group is drawn again.
        with_baseline: a greedy sample too, ReMax's baseline.
        temperatures: of sources with their own, by name.
    """

    samples: int
    least: int
    with_baseline: bool = False
    temperatures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: BatchConfig, algorithm: AlgorithmConfig, data: DataConfig) -> GroupDraw:
        inputs = estimator_of(algorithm.advantage).inputs
        least = batch.least_samples
        if "k" in inputs:  # smaller groups have no advantage
            least = max(least, algorithm.pass_k + 1)
        return cls(batch.samples_per_prompt, least, "baselines" in inputs, data.temperatures)


class GroupScorer:
    """Samples and scores groups, and keeps the finished ones of each batch until it is trained on.

    Args:
        sampling: of each launched batch, by number.
        seed: the run's.
        draw: samples of each prompt.
        scored_by: whose log-probs the samples get.
        finished: groups that a checkpoint kept, by batch number; they are not sampled again.
    """

    def __init__(
        self,
        workers: Workers,
        sampling: Mapping[int, Sampling],
        *,
        seed: int,
        draw: GroupDraw,
        finished: Mapping[int, Sequence[Group]],
        scored_by: FrozenModels,
    ) -> None:
        self._workers, self._sampling = workers, sampling
        self._seed, self._draw = seed, draw
        self._models = scored_by
        self._finished = {
            batch: {group.prompt.uid: group for group in groups} for batch, groups in finished.items()
        }

    async def score(self, prompts: Sequence[Prompt], batch: int) -> ScoredBatch:
        """Sample a group of each prompt; reward and reference run at the same time."""
        return ScoredBatch(await gather(self.scored_group(prompt, batch) for prompt in prompts))

    async def score_with_signal(
        self,
        prompts: Sequence[Prompt],
        batch: int,
        *,
        wanted: int,
        oversample: float,
        has_signal: Callable[[Group], bool],
    ) -> SampledBatch:
        """Sample dynamically, see `refill.Refill`: ``prompts`` are ``wanted`` of the step itself, then those
        to draw on where groups have no signal.
        """
        sample = partial(self.group, batch=batch)
        return await Refill(sample, has_signal, prompts, wanted=wanted, oversample=oversample).batch()

    async def with_reference(self, batch: SampledBatch) -> ScoredBatch:
        """Compute the log-probs of reference and teachers of groups that are sampled and scored already."""
        return ScoredBatch(await gather(self.referenced(g) for g in batch.groups), batch.discarded)

    async def renewed(self, batch: ScoredBatch) -> ScoredBatch:
        """Return ``batch`` with the log-probs of a reference that has changed since."""
        scored = await gather(self.referenced(s.group, s.teacher_logprobs) for s in batch.scored)
        return replace(batch, scored=scored)

    def finished(self, batch: int) -> list[Group]:
        """Return the groups of ``batch`` that are sampled and scored."""
        return list(self._finished.get(batch, {}).values())

    def forget(self, batch: int, uid: str | None = None) -> None:
        """Drop the groups of ``batch``, or the one of prompt ``uid``: a step takes them."""
        if uid is not None:
            self._finished.get(batch, {}).pop(uid, None)
        if uid is None or not self._finished.get(batch):
            self._finished.pop(batch, None)

    async def scored_group(self, prompt: Prompt, batch: int) -> ScoredGroup:
        """Sample a group and score it; reward, reference and teachers at the same time."""
        return await sampled_again(lambda: self._scored_once(prompt, batch))

    async def _scored_once(self, prompt: Prompt, batch: int) -> ScoredGroup:
        if kept := self._kept(prompt, batch):
            return await self.referenced(kept)

        async def scored(seeds: Sequence[int]) -> ScoredGroup:
            return await self.scored(prompt, await self._sample(prompt, batch, seeds), batch)

        return await self._drawn(prompt, batch, scored)

    async def scored(self, prompt: Prompt, rollouts: RolloutsRef, batch: int) -> ScoredGroup:
        """Score samples of ``prompt`` that exist already; reward, reference and teachers at the same time."""
        if not self._models:
            return ScoredGroup(await self._graded(prompt, rollouts, batch), [])
        group, known = await gather(
            [self._graded(prompt, rollouts, batch), self._models.logprobs(prompt, rollouts)]
        )
        return ScoredGroup(group, *known)

    async def group(self, prompt: Prompt, batch: int) -> Group:
        """Sample a group and compute its rewards."""
        if kept := self._kept(prompt, batch):
            return kept

        async def graded(seeds: Sequence[int]) -> Group:
            return await self._graded(prompt, await self._sample(prompt, batch, seeds), batch)

        return await sampled_again(lambda: self._drawn(prompt, batch, graded))

    async def _drawn(self, prompt: Prompt, batch: int, work: Callable[[Sequence[int]], Awaitable[T]]) -> T:
        """Return what ``work`` makes of the samples with the seeds of a draw, see `enough_samples`."""

        def seeds(number: int) -> list[int]:
            first = number * self._draw.samples
            return request_seeds(self._seed, batch, prompt.uid, range(first, first + self._draw.samples))

        return await enough_samples(work, seeds, least=self._draw.least)

    def _kept(self, prompt: Prompt, batch: int) -> Group | None:
        """Return the group if it was finished before the run was interrupted."""
        return self._finished.get(batch, {}).get(prompt.uid)

    async def _graded(self, prompt: Prompt, rollouts: RolloutsRef, batch: int) -> Group:
        group = await self._rewarded(prompt, rollouts, batch)
        self._finished.setdefault(batch, {})[prompt.uid] = group
        return group

    async def _rewarded(self, prompt: Prompt, rollouts: RolloutsRef, batch: int) -> Group:
        if not self._draw.with_baseline:
            return await self._workers.rewards.score(prompt, rollouts)
        group, baseline = await gather(
            [self._workers.rewards.score(prompt, rollouts), self._greedy_reward(prompt, batch)]
        )
        if math.isnan(baseline):  # without it no sample of the group has an advantage: none is trained
            group = replace(group, rewards=np.full_like(group.rewards, np.nan))
        return replace(group, baseline_reward=baseline)

    async def _sample(self, prompt: Prompt, batch: int, seeds: Sequence[int]) -> RolloutsRef:
        sampling = self.sampling_of(prompt, self._sampling[batch])
        if sampling.least != self._draw.least:
            sampling = replace(sampling, least=self._draw.least)
        return await self._workers.rollouts.sample(prompt, seeds=seeds, sampling=sampling)

    def sampling_of(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        """Return ``sampling`` with the temperature of the prompt's source, where that has its own."""
        own = self._draw.temperatures.get(prompt.source, sampling.temperature)
        return sampling if own == sampling.temperature else replace(sampling, temperature=own)

    async def _greedy_reward(self, prompt: Prompt, batch: int) -> float:
        """Return the reward of the most likely completion."""
        seed = request_seed(self._seed, batch, prompt.uid, -1)
        rollouts = await self._workers.rollouts.sample(
            prompt, seeds=[seed], sampling=replace(self._sampling[batch], temperature=0.0)
        )
        return float((await self._workers.rewards.score(prompt, rollouts)).rewards[0])

    async def referenced(
        self, group: Group, before: Mapping[str, list[TeacherLogprobs]] | None = None
    ) -> ScoredGroup:
        """Compute the log-probs of reference and teachers. ``before``: those of teachers that are known."""
        return ScoredGroup(group, *await self._models.logprobs(group.prompt, group.rollouts, before))


async def enough_samples(
    work: Callable[[Sequence[int]], Awaitable[T]], seeds: Callable[[int], Sequence[int]], *, least: int
) -> T:
    """Return what ``work`` makes of the samples with ``seeds(0)``; with those of draw 1, and then 2, where
    engines give fewer than ``least`` of them. Raises SamplesFailed after the third draw.
    """
    for number in range(_DRAWS):
        try:
            return await work(seeds(number))
        except SamplesFailed as error:
            wanted = f"{least}, half of `batch.samples_per_prompt`"
            if number == _DRAWS - 1:
                raise SamplesFailed(
                    f"{cause_of(error)}; the last of {_DRAWS} draws, expected at least {wanted}. See the "
                    "logs of the engines"
                ) from error
            why = cause_of(error)
            logger.warning("%s, expected at least %s; the group is drawn again", why, wanted)
    raise AssertionError("the last draw returns or raises")


def as_drawn(groups: Sequence[Group], sampling: Sampling) -> list[Group]:
    """Return ``groups`` whose samples all say how they were drawn: those of an earlier version do not."""

    def drawn(rollout: Rollout) -> Rollout:
        if rollout.temperature is not None:
            return rollout
        return replace(rollout, temperature=sampling.temperature, max_new_tokens=sampling.max_new_tokens)

    return [replace(group, rollouts=tuple(map(drawn, group.rollouts))) for group in groups]
