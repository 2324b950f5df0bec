"""Evaluation samples, from the engines and graders that training uses, with their own sampling settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np

from grpo_dist.config import Config, EvaluationConfig, RejectionConfig, SamplingConfig
from grpo_dist.evaluation.estimates import Estimate, estimate, summarise
from grpo_dist.runtime.concurrency import gather, progressing, sampled_again
from grpo_dist.runtime.recorder import Recorder
from grpo_dist.runtime.seeds import request_seeds
from grpo_dist.runtime.stage_log import note
from grpo_dist.types import Group, Prompt, Sampling, correctness
from grpo_dist.workers import RewardHandle, RolloutHandle

STAGE = -1  # in request seeds; training steps count from 0


@dataclass(frozen=True)
class EvalSet:
    name: str
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True)
class Draw:
    """How the samples of an evaluation, or of rejection sampling, are drawn."""

    sampling: Sampling
    samples: int  # per prompt
    seed: int
    sample_s: float  # deadline of the next finished prompt

    @classmethod
    def of(
        cls,
        settings: EvaluationConfig | RejectionConfig,
        training: SamplingConfig,
        *,
        seed: int,
        sample_s: float,
    ) -> Draw:
        """Translate ``settings``; what they leave open is as in ``training``."""
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_new_tokens=settings.max_new_tokens or training.longest,
            stop=training.stop,
        )
        return cls(sampling, settings.samples_per_prompt, seed, sample_s)


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

    A sample is right if the math grader accepts it, or the judge where `math` is not among the rewards. Where
    neither ran, it is right if its total reward is above 0.5. Samples that could not be scored are left out
    of the estimate and counted in ``eval/<set>/unscored``. Raises TimeoutError, with the answer
    of ``explain``, when no prompt is sampled or done for `timeouts.sample_s`.
    """
    settings, sample_s = config.evaluation, config.cluster.timeouts.sample_s
    draw = Draw.of(settings, config.sampling, seed=config.seed, sample_s=sample_s)
    metrics: dict[str, float] = {}
    for eval_set in eval_sets:
        prompts = eval_set.prompts[: settings.max_prompts]
        groups = await _sample_all(draw, workers, eval_set.name, prompts, explain)
        recorder.samples(f"eval_{eval_set.name}_step_{step:06d}", groups)
        correct = [correctness(group) for group in groups]
        metrics |= {f"eval/{eval_set.name}/{k}": v for k, v in summarise(correct, settings.k).items()}
        lengths = [r.num_tokens for g in groups for r in g.rollouts]
        metrics[f"eval/{eval_set.name}/length_tokens"] = float(np.mean(lengths))
        metrics[f"eval/{eval_set.name}/unscored"] = float(sum(np.isnan(c).sum() for c in correct))
        if any(rollout.turns for group in groups for rollout in group.rollouts):
            share = _tool_call_share(groups)
            metrics[f"eval/{eval_set.name}/tool_call_share"] = share.value
            metrics[f"eval/{eval_set.name}/tool_call_share_stderr"] = share.stderr
    return metrics


def _tool_call_share(groups: Sequence[Group]) -> Estimate:
    """Estimate the share of episodes with a tool call, over problems."""
    called = [[any(turn.calls for turn in rollout.turns) for rollout in group.rollouts] for group in groups]
    return estimate([float(np.mean(own)) for own in called], samples=sum(map(len, called)))


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

    All chunks are requested at once, in order, so that no engine is idle at the end of one.

    Args:
        finished: called with each chunk once all its prompts are done.
        stage: negative, so that seeds differ from those of every training step. The same stage draws with the
            same seeds, which takes sampling noise out of the difference between two evaluations.
        what: names the stage in the TimeoutError raised when no prompt is sampled or done for
            ``draw.sample_s``. On shared GPUs reward models score once all prompts are sampled.
        explain: asked then for a text to add to the error.
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

    async with progressing(draw.sample_s, f"{what}: the next prompt", explain=explain) as still_going:
        await gather(chunk(number, prompts) for number, prompts in chunks.items())


async def _sample_group(
    draw: Draw, workers: EvaluationHandles, prompt: Prompt, *, stage: int, sampled: Callable[[], None]
) -> Group:
    seeds = request_seeds(draw.seed, stage, prompt.uid, range(draw.samples))

    async def scored() -> Group:
        rollouts = await workers.rollouts.sample(prompt, seeds=seeds, sampling=draw.sampling)
        sampled()
        return await workers.rewards.score(prompt, rollouts)

    return await sampled_again(scored)
