"""Samples for evaluation, from the engines and graders of training, with separate sampling settings."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

import numpy as np

from grpo_dist.config import Config, EvaluationConfig, RejectionConfig
from grpo_dist.errors import SamplesFailed, find_cause
from grpo_dist.evaluation.result import JudgedProblem, Verdict, measure
from grpo_dist.runtime.concurrency import deadline, gather, retry_lost_samples
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.runtime.seeds import request_seeds
from grpo_dist.runtime.stage_log import note
from grpo_dist.types import Group, Prompt, Rollout, Sampling
from grpo_dist.workers import RewardHandle, RolloutHandle

logger = logging.getLogger("grpo_dist")

STAGE = -1  # for request seeds; training steps count from 0


@dataclass(frozen=True)
class EvalSet:
    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class Draw:
    """How evaluation or rejection sampling draws its samples."""

    sampling: Sampling
    samples: int  # per prompt
    seed: int
    sample_s: float  # deadline for the next finished prompt

    @classmethod
    def from_config(cls, config: Config, settings: EvaluationConfig | RejectionConfig) -> Draw:
        """Translate ``settings``, of ``config``; unset values are as in training."""
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=settings.max_new_tokens or config.sampling.longest,
            stop=config.sampling.stop,
            least=1,
        )
        return cls(sampling, settings.samples_per_prompt, config.seed, config.cluster.timeouts.sample_s)


class EvaluationHandles(Protocol):
    """The two workers an evaluation needs."""

    @property
    def rollouts(self) -> RolloutHandle: ...
    @property
    def rewards(self) -> RewardHandle: ...


async def evaluate(
    config: Config,
    workers: EvaluationHandles,
    eval_sets: list[EvalSet],
    recorder: Recorder,
    *,
    step: int,
    explain: Callable[[], Awaitable[str]] | None = None,
) -> dict[str, float]:
    """Compute ``eval/<set>/pass@k`` and ``_stderr`` for every set, and for sets with an environment
    ``tool_call_share``.

    A sample is right if the math grader accepts it, or the judge where `math` is not among the rewards. If
    neither ran, it is right if its total reward is above 0.5. Samples that could not be drawn or scored are
    left out of the estimate and counted in ``eval/<set>/unscored``. Raises TimeoutError, with the answer of
    ``explain``, when no prompt is sampled or done for `timeouts.sample_s`.
    """
    draw = Draw.from_config(config, config.evaluation)
    metrics: dict[str, float] = {}
    for eval_set in eval_sets:
        groups = await _sample_all(draw, workers, eval_set.name, list(eval_set.prompts), explain)
        recorder.samples(f"eval_{eval_set.name}_step_{step:06d}", groups)
        ks, name = config.evaluation.k, eval_set.name
        judged = [
            JudgedProblem.from_verdict(name, group.prompt, {}, Verdict.from_group(group), ks)
            for group in groups
        ]
        metrics |= next(measure(judged)).metrics()
    return metrics


async def _sample_all(
    draw: Draw,
    workers: EvaluationHandles,
    name: str,
    prompts: list[Prompt],
    explain: Callable[[], Awaitable[str]] | None,
) -> list[Group]:
    groups: list[Group] = []

    async def finished(_: int, chunk: list[Group]) -> None:
        groups.extend(chunk)

    what = f"evaluate: {name} ({len(prompts)} prompts)"
    await sample_chunks(draw, workers, {0: prompts}, finished, stage=STAGE, what=what, explain=explain)
    return groups


async def sample_chunks(
    draw: Draw,
    workers: EvaluationHandles,
    chunks: Mapping[int, list[Prompt]],
    finished: Callable[[int, list[Group]], Awaitable[None]],
    *,
    stage: int,
    what: str,
    explain: Callable[[], Awaitable[str]] | None = None,
) -> None:
    """Draw and score samples of each prompt, apart from any training step.

    All chunks are requested at once, in order, so that no engine is idle at the end of a chunk. Every group
    has ``draw.samples`` samples; those that the engines gave up are empty, see `add_missing`.

    Args:
        finished: called with each chunk once all its prompts are done.
        stage: negative, so that seeds differ from those of every training step. A stage always draws
            with the same seeds, which takes sampling noise out of the difference between two evaluations.
        what: names the stage in the TimeoutError raised when no prompt is sampled or done for
            ``draw.sample_s``. Colocated reward models score once all prompts are sampled.
        explain: returns a text to add to that error.
    """
    total, done = sum(map(len, chunks.values())), count(1)

    async def one(prompt: Prompt) -> Group:
        group = await _sample_group(draw, workers, prompt, stage=stage, sampled=still_going)
        still_going()
        note(f"{next(done)} of {total} prompts are done")
        return group

    async def chunk(number: int, prompts: list[Prompt]) -> None:
        await finished(number, await gather(one(prompt) for prompt in prompts))
        still_going()

    async with deadline(draw.sample_s, f"{what}: the next prompt", explain=explain) as still_going:
        await gather(chunk(number, prompts) for number, prompts in chunks.items())


async def _sample_group(
    draw: Draw, workers: EvaluationHandles, prompt: Prompt, *, stage: int, sampled: Callable[[], None]
) -> Group:
    seeds = request_seeds(draw.seed, stage, prompt.uid, range(draw.samples))

    async def scored() -> Group:
        rollouts = await workers.rollouts.sample(prompt, seeds=seeds, sampling=draw.sampling)
        sampled()
        return await workers.rewards.score(prompt, rollouts)

    try:
        group = await retry_lost_samples(scored)
    except SamplesFailed as error:
        logger.warning("%s; the problem has no samples, and counts as not scored", find_cause(error))
        group = Group(prompt, (), np.empty(0, np.float32), {}, ())
    return add_missing(group, draw)


def add_missing(group: Group, draw: Draw) -> Group:
    """Return ``group`` with an empty sample, finish reason "error", for each that the engines gave up. Its
    rewards are NaN, as it was not scored, and its outcome is "error" if there is a math grader.
    """
    sampled = {rollout.sample: i for i, rollout in enumerate(group.rollouts)}
    if len(sampled) == draw.samples:
        return group
    indices = [sampled.get(sample) for sample in range(draw.samples)]

    def whole(rewards: np.ndarray) -> np.ndarray:
        return np.array([np.nan if i is None else rewards[i] for i in indices], np.float32)

    def steps(arrays: tuple[np.ndarray, ...] | None, dtype: type) -> tuple[np.ndarray, ...] | None:
        if arrays is None:
            return None
        return tuple(np.empty(0, dtype) if i is None else arrays[i] for i in indices)

    outcome = "error" if any(group.outcomes) else ""
    settings = {"temperature": draw.sampling.temperature, "max_new_tokens": draw.sampling.max_new_tokens}
    return replace(
        group,
        rollouts=tuple(
            Rollout.without_tokens(group.prompt.uid, sample, **settings) if i is None else group.rollouts[i]
            for sample, i in enumerate(indices)
        ),
        rewards=whole(group.rewards),
        reward_parts={name: whole(part) for name, part in group.reward_parts.items()},
        outcomes=tuple(outcome if i is None else group.outcomes[i] for i in indices),
        step_rewards=steps(group.step_rewards, np.float32),
        step_ends=steps(group.step_ends, np.int32),
        failures=tuple(() if i is None else group.failures[i] for i in indices) if group.failures else (),
    )
