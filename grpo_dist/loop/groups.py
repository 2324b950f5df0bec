"""Groups: one prompt's samples, their scores, and the log-probs of reference and teachers.

rollouts    | sample | greedy sample (ReMax)
rewards              | score
reference            | log-probs              as soon as the samples are there, in parallel with the score
teachers             | log-probs              of teachers of the prompt's source
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from grpo_dist.config import Config, DistillationConfig, TeacherConfig
from grpo_dist.config.algorithm import PassAtKAdvantage
from grpo_dist.loop.progress import SampledBatch
from grpo_dist.runtime.concurrency import gather, sample_until_enough
from grpo_dist.runtime.seeds import request_seed, request_seeds
from grpo_dist.types import Group, Prompt, Sampling, TeacherLogprobs
from grpo_dist.workers import ReferenceHandle, RolloutsRef, Workers

_AS_POLICY = ""  # the reference, with the prompt that the policy reads; no teacher has this name
# One entry per row of each sample of a group.
Logprobs = list[np.ndarray]  # float32 [C]
TeacherRows = list[TeacherLogprobs]


class FrozenModels:
    """Requests the log-probs that a group needs, all in parallel. False where no group needs any.

    Args:
        with_kl: the KL term needs the reference's log-probs.
        distillation: each of its teachers is asked about the sources it teaches, with the prompt that it
            reads.
    """

    def __init__(self, workers: Workers, distillation: DistillationConfig, *, with_kl: bool) -> None:
        self._reference = workers.reference if with_kl else None
        self._teachers = [(teacher, _handle(workers, teacher)) for teacher in distillation.teachers]
        self._top_k = distillation.top_k

    def __bool__(self) -> bool:
        return self._reference is not None or bool(self._teachers)

    async def logprobs(
        self, prompt: Prompt, rollouts: RolloutsRef, before: Mapping[str, TeacherRows] | None = None
    ) -> tuple[Logprobs, Mapping[str, TeacherRows]]:
        """Return log-probs of the reference, [] without a KL term, and of each teacher by name.

        The reference is asked once about the prompt that the policy reads, for the KL term and for teachers.

        Args:
            before: the teachers' log-probs of the same samples, before the reference changed: teachers with
                their own model are not asked again.
        """
        teachers = [(teacher, handle) for teacher, handle in self._teachers if teacher.teaches(prompt.source)]
        unchanged = {
            t.name: before[t.name] for t, _ in teachers if before and t.has_workers and t.name in before
        }
        requests = {}
        for teacher, handle in teachers:
            name = _request_key(teacher, prompt)
            if name not in unchanged and name not in requests:
                requests[name] = handle.logprobs(_replace_prompt(teacher.name, prompt), rollouts, self._top_k)
        if self._reference is not None and _AS_POLICY not in requests:
            requests[_AS_POLICY] = self._reference.logprobs(prompt, rollouts)
        answers = unchanged | dict(zip(requests, await gather(requests.values()), strict=True))
        taught = {teacher.name: answers[_request_key(teacher, prompt)] for teacher, _ in teachers}
        reference = [] if self._reference is None else answers[_AS_POLICY]
        return [row.sampled for row in reference], taught


def _request_key(teacher: TeacherConfig, prompt: Prompt) -> str:
    """Return a key that is equal for teachers with the same answer."""
    shares_reference = not teacher.has_workers and teacher.name not in prompt.teacher_ids
    return _AS_POLICY if shares_reference else teacher.name


def _handle(workers: Workers, teacher: TeacherConfig) -> ReferenceHandle:
    handle = workers.teachers[teacher.name] if teacher.has_workers else workers.reference
    assert handle is not None, "a teacher that is the reference needs one"
    return handle


def _replace_prompt(teacher: str, prompt: Prompt) -> Prompt:
    """Return ``prompt`` with the tokens that the teacher reads instead."""
    token_ids = prompt.teacher_ids.get(teacher)
    return prompt if token_ids is None else replace(prompt, token_ids=token_ids, teacher_ids={})


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group ready to train on. ``ref_logprobs``: float32 [C] for each row of each sample; empty
    without a KL term. ``teacher_logprobs``: by teacher name, one entry per row.
    """

    group: Group
    ref_logprobs: list[np.ndarray]
    teacher_logprobs: Mapping[str, list[TeacherLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The groups that one step trains on, and the groups that dynamic sampling discarded.

    ``advantages``: float32 [G] of each group, from a caller with its own estimator; None: the configured one.
    ``metrics``: about the assembly of the batch.
    """

    scored: list[ScoredGroup]
    discarded: list[Group] = field(default_factory=list)
    advantages: Sequence[np.ndarray] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        """Return the groups to train on."""
        return [s.group for s in self.scored]

    @property
    def sampled(self) -> list[Group]:
        """Return the groups to train on, and the discarded ones."""
        return self.groups + self.discarded

    def without_reference(self) -> SampledBatch:
        return SampledBatch(self.groups, self.discarded)


@dataclass(frozen=True, slots=True)
class GroupDraw:
    """What is sampled of each prompt.

    Attributes:
        samples: samples per group.
        least: samples that suffice if the engines lose the others; with fewer the group is drawn again.
        with_baseline: a greedy sample too, ReMax's baseline.
        temperatures: by name of the sources that set one.
        baselines: ``with_baseline`` by name of the sources with their own algorithm.
    """

    samples: int
    least: int
    with_baseline: bool = False
    temperatures: Mapping[str, float] = field(default_factory=dict)
    baselines: Mapping[str, bool] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Config) -> GroupDraw:
        sizes = [e.k + 1 for e in config.estimators if isinstance(e, PassAtKAdvantage)]
        return cls(
            config.batch.samples_per_prompt,
            max(config.batch.least_samples, *sizes, 0),  # smaller groups have no advantage
            config.algorithm.advantage.traits.reads_greedy_answer,
            config.data.temperatures,
            {
                source: algorithm.advantage.traits.reads_greedy_answer
                for source, algorithm in config.source_algorithms.items()
            },
        )


class GroupScorer:
    """Samples and scores groups, and keeps the finished groups of each batch until it is trained on.

    Args:
        sampling: settings of each launched batch, by number.
        seed: seed of the run.
        draw: samples per prompt.
        models: reference and teachers, whose log-probs the samples get.
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
        models: FrozenModels,
    ) -> None:
        self._workers, self._sampling = workers, sampling
        self._seed, self._draw = seed, draw
        self._models = models
        self._finished = {
            batch: {group.prompt.uid: group for group in groups} for batch, groups in finished.items()
        }

    async def with_reference(self, batch: SampledBatch) -> ScoredBatch:
        """Add the log-probs of reference and teachers to groups that are sampled and scored already."""
        return ScoredBatch(await gather(self.add_logprobs(g) for g in batch.groups), batch.discarded)

    async def renew(self, batch: ScoredBatch) -> ScoredBatch:
        """Return ``batch`` with the log-probs of the changed reference."""
        scored = await gather(self.add_logprobs(s.group, s.teacher_logprobs) for s in batch.scored)
        return replace(batch, scored=scored)

    def finished(self, batch: int) -> list[Group]:
        """Return the groups of ``batch`` that are sampled and scored."""
        return list(self._finished.get(batch, {}).values())

    def forget(self, batch: int, uid: str | None = None) -> None:
        """Drop the groups of ``batch``, or only the group of prompt ``uid``: a step took them."""
        if uid is not None:
            self._finished.get(batch, {}).pop(uid, None)
        if uid is None or not self._finished.get(batch):
            self._finished.pop(batch, None)

    async def sample_and_score(self, prompt: Prompt, batch: int) -> ScoredGroup:
        """Sample a group and score it; reward, reference and teachers in parallel."""

        async def sample(seeds: Sequence[int]) -> ScoredGroup:
            if finished := self._finished.get(batch, {}).get(prompt.uid):
                return await self.add_logprobs(finished)
            return await self.score_samples(prompt, await self._sample(prompt, batch, seeds), batch)

        return await sample_until_enough(sample, self._seeds(prompt, batch), least=self._draw.least)

    async def sample_and_grade(self, prompt: Prompt, batch: int) -> Group:
        """Sample a group and compute its rewards."""

        async def sample(seeds: Sequence[int]) -> Group:
            if finished := self._finished.get(batch, {}).get(prompt.uid):
                return finished
            return await self._grade(prompt, await self._sample(prompt, batch, seeds), batch)

        return await sample_until_enough(sample, self._seeds(prompt, batch), least=self._draw.least)

    async def score_samples(self, prompt: Prompt, rollouts: RolloutsRef, batch: int) -> ScoredGroup:
        """Score existing samples of ``prompt``; reward, reference and teachers in parallel."""
        if not self._models:
            return ScoredGroup(await self._grade(prompt, rollouts, batch), [])
        group, logprobs = await gather(
            [self._grade(prompt, rollouts, batch), self._models.logprobs(prompt, rollouts)]
        )
        return ScoredGroup(group, *logprobs)

    async def add_logprobs(
        self, group: Group, before: Mapping[str, list[TeacherLogprobs]] | None = None
    ) -> ScoredGroup:
        """Add the log-probs of reference and teachers. ``before``: known log-probs of teachers."""
        return ScoredGroup(group, *await self._models.logprobs(group.prompt, group.rollouts, before))

    def sampling_for(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        """Return ``sampling`` with the temperature of the prompt's source and the samples that suffice."""
        temperature = self._draw.temperatures.get(prompt.source, sampling.temperature)
        return _sampling_with(sampling, temperature, self._draw.least)

    def _seeds(self, prompt: Prompt, batch: int) -> Callable[[int], list[int]]:
        """Return a function from the number of a group's draw to its seeds."""
        count = self._draw.samples
        return lambda draw: request_seeds(
            self._seed, batch, prompt.uid, range(draw * count, (draw + 1) * count)
        )

    async def _sample(self, prompt: Prompt, batch: int, seeds: Sequence[int]) -> RolloutsRef:
        sampling = self.sampling_for(prompt, self._sampling[batch])
        return await self._workers.rollouts.sample(prompt, seeds=seeds, sampling=sampling)

    async def _grade(self, prompt: Prompt, rollouts: RolloutsRef, batch: int) -> Group:
        """Compute the rewards, with ReMax's greedy baseline, and keep the group as finished."""
        if self._draw.baselines.get(prompt.source, self._draw.with_baseline):
            group, baseline = await gather(
                [self._workers.rewards.score(prompt, rollouts), self._greedy_reward(prompt, batch)]
            )
            if math.isnan(baseline):  # no baseline, no advantages: the group is not trained
                group = replace(group, rewards=np.full_like(group.rewards, np.nan))
            group = replace(group, baseline_reward=baseline)
        else:
            group = await self._workers.rewards.score(prompt, rollouts)
        self._finished.setdefault(batch, {})[prompt.uid] = group
        return group

    async def _greedy_reward(self, prompt: Prompt, batch: int) -> float:
        """Return the reward of the most likely completion."""
        seed = request_seed(self._seed, batch, prompt.uid, -1)
        greedy = replace(self._sampling[batch], temperature=0.0)
        rollouts = await self._workers.rollouts.sample(prompt, seeds=[seed], sampling=greedy)
        return float((await self._workers.rewards.score(prompt, rollouts)).rewards[0])


@lru_cache(maxsize=64)
def _sampling_with(sampling: Sampling, temperature: float, least: int) -> Sampling:
    """Return the same object for all groups of a source, so that messages of many groups hold it once."""
    return replace(sampling, temperature=temperature, least=least)
