"""Engines alone on a cluster of this machine, as an evaluation has them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.config import ClusterConfig, Config, SamplingConfig
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.tools.gpu_check.trainers import model_dir_of
from grpo_dist.types import Prompt, Rollout, Sampling

PROMPT = Prompt("p", np.arange(7, 16, dtype=np.int32), "", "gpu-check")  # less than a block of the cache


@asynccontextmanager
async def sampling_engines(config: Config) -> AsyncIterator[Any]:
    """Yield the handle of the engines of ``config``."""
    from actors.cluster import Cluster  # needs Ray, which other lines do not

    async with Cluster(config) as cluster:
        async with deadline(config.cluster.timeouts.up_s, "start: engines up and models loaded"):
            samplers = await cluster.start_evaluation(Path(model_dir_of(config.model, config.seed)))
        yield samplers.rollouts


async def sampled(
    rollouts: Any, cluster: ClusterConfig, settings: SamplingConfig, seeds: Sequence[int]
) -> list[Rollout]:
    """Return a sample of `PROMPT` for each of ``seeds``, of `sampling.max_new_tokens` tokens."""
    tokens, limit_s = settings.longest, cluster.timeouts.sample_s
    sampling = Sampling(max_new_tokens=tokens, lengths=(tokens,) * len(seeds))
    async with deadline(limit_s, "samples of the check"):
        return list(await (await rollouts.sample(PROMPT, seeds=list(seeds), sampling=sampling)))


def same(a: Sequence[Rollout], b: Sequence[Rollout]) -> bool:
    """Return whether the samples have the same tokens."""
    return all(np.array_equal(x.completion_ids, y.completion_ids) for x, y in zip(a, b, strict=True))
