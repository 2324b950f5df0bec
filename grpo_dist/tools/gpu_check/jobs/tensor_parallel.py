"""An engine over two GPUs, in separate placement: it computes what the trainer computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np

from grpo_dist.batch.rows import make_batch
from grpo_dist.config import ClusterConfig, SamplingConfig
from grpo_dist.loop.sync_probe import BOUNDS
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.jobs.engine import engine_config
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.sampling import PROMPT, same, sampled, sampling_engines
from grpo_dist.tools.gpu_check.sizes import dtype_of
from grpo_dist.tools.gpu_check.trainer_job import TrainerSections
from grpo_dist.tools.gpu_check.trainers import trainer_logprobs, trainer_sections
from grpo_dist.types import Group, Rollout

_SEEDS = (1, 2, 3, 4)


def measure(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    found = Findings()
    # A CPU's engine has no tensor parallelism; all the rest is the same.
    config = engine_config(task, eager=True, tensor_parallel_size=1 if task.rehearsal else 2)
    rollouts = asyncio.run(_samples(sampling_engines(config), config.cluster, config.sampling, found))
    bound, why = BOUNDS[dtype_of(task)], "the sync probe's bound"
    apart = _differences(trainer_sections(config), rollouts, longest=config.sampling.longest)
    found.at_most("log-probs of trainer and engine: nats a token", float(np.abs(apart).mean()), bound, why)
    yield "tensor-parallel", found


async def _samples(
    engines: AbstractAsyncContextManager[Any],
    cluster: ClusterConfig,
    sampling: SamplingConfig,
    found: Findings,
) -> list[Rollout]:
    begin = time.perf_counter()
    async with engines as rollouts:
        found.figures["tensor-parallel/start_s"] = time.perf_counter() - begin
        samples = await sampled(rollouts, cluster, sampling, _SEEDS)
        one, again = (
            await sampled(rollouts, cluster, sampling, [1]),
            await sampled(rollouts, cluster, sampling, [1]),
        )
        found.true("the same seed, the same tokens", same(one, again), "one request at a time")
    return samples


def _differences(sections: TrainerSections, rollouts: Sequence[Rollout], *, longest: int) -> np.ndarray:
    """Return trainer - engine of every sampled token, in nats."""
    rewards = np.zeros(len(rollouts), np.float32)
    group = Group(PROMPT, tuple(rollouts), rewards, {}, ("",) * len(rollouts))
    batch = make_batch([group], [rewards], ref_logprobs=None, max_new_tokens=longest)
    own: np.ndarray = trainer_logprobs(sections, batch) - batch.rollout_logprobs.numpy()
    return own[batch.loss_mask.numpy()]
