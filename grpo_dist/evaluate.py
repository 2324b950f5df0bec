"""Evaluation through the same engines and graders that training uses, with its own sampling settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from grpo_dist.concurrency import deadline, gather
from grpo_dist.config import Config
from grpo_dist.evaluation import summarise
from grpo_dist.seeds import request_seed
from grpo_dist.types import Group, Prompt, Sampling
from grpo_dist.workers import Rewards, Rollouts


@dataclass(frozen=True)
class EvalSet:
    name: str
    prompts: list[Prompt]


class Samplers(Protocol):
    """The two workers an evaluation needs."""

    @property
    def rollouts(self) -> Rollouts: ...
    @property
    def rewards(self) -> Rewards: ...


class SampleSink(Protocol):
    def samples(self, name: str, groups: list[Group]) -> None: ...


async def evaluate(
    config: Config, workers: Samplers, eval_sets: list[EvalSet], sink: SampleSink, *, step: int
) -> dict[str, float]:
    """``eval/<set>/pass@k`` and ``_stderr`` for every set. A sample counts as right when the math grader says
    so.

    Where no math grader is among the rewards, a sample is right when its total reward is above 0.5. What
    could not be scored is left out of the estimate and counted in ``eval/<set>/unscored``. Raises
    TimeoutError past the deadline.
    """
    metrics: dict[str, float] = {}
    for eval_set in eval_sets:
        prompts = eval_set.prompts[: config.evaluation.max_prompts]
        stage = f"evaluate: {eval_set.name} ({len(prompts)} prompts)"
        async with deadline(config.cluster.timeouts.sample_s, stage):
            groups = await _sample(config, workers, prompts)
        sink.samples(f"eval_{eval_set.name}_step_{step:06d}", groups)
        correct = [correctness(group) for group in groups]
        metrics |= {
            f"eval/{eval_set.name}/{k}": v for k, v in summarise(correct, config.evaluation.k).items()
        }
        lengths = [len(r.completion_ids) for g in groups for r in g.rollouts]
        metrics[f"eval/{eval_set.name}/length_tokens"] = float(np.mean(lengths))
        metrics[f"eval/{eval_set.name}/unscored"] = float(sum(np.isnan(c).sum() for c in correct))
    return metrics


def correctness(group: Group) -> np.ndarray:
    """float32 [G]: 1 right, 0 wrong, NaN not scorable."""
    if any(group.outcomes):
        known = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0}
        return np.array([known.get(o, np.nan) for o in group.outcomes], dtype=np.float32)
    return np.where(np.isnan(group.rewards), np.nan, group.rewards > 0.5).astype(np.float32)


async def _sample(config: Config, workers: Samplers, prompts: list[Prompt]) -> list[Group]:
    settings = config.evaluation
    sampling = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_new_tokens=settings.max_new_tokens or config.sampling.max_new_tokens,
    )

    async def one(prompt: Prompt) -> Group:
        # Stage -1: the seeds of an evaluation never meet those of a training step, and every evaluation of a
        # run draws with the same seeds, which takes sampling noise out of the difference between two of them.
        seeds = [request_seed(config.seed, -1, prompt.uid, i) for i in range(settings.samples_per_prompt)]
        rollouts = await workers.rollouts.sample(prompt, seeds=seeds, sampling=sampling)
        return await workers.rewards.score(prompt, rollouts)

    return await gather(one(prompt) for prompt in prompts)
