"""Sampling outside of a training run: engines and graders for the length of one call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from grpo_dist.config import Config, EvaluationConfig, RejectionConfig
from grpo_dist.evaluation.sampling import sample_chunks
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.types import Group, Prompt


async def sample_with_model(
    config: Config,
    settings: EvaluationConfig | RejectionConfig,
    model_dir: Path,
    chunks: Mapping[int, list[Prompt]],
    finished: Callable[[int, list[Group]], Awaitable[None]],
    *,
    stage: int,
    what: str,
    shown: AbstractContextManager[None],
) -> None:
    """Start a cluster with the model in ``model_dir``, sample and score ``chunks``, and stop the cluster.

    Args:
        finished, stage, what: see `sample_chunks`.
        shown: the stage that the log shows while samples are drawn.
    """
    from actors.cluster import Cluster  # imports Ray

    async with Cluster(config) as cluster:
        async with deadline(
            config.cluster.timeouts.up_s, "start: engine and graders up", explain=cluster.where_stuck
        ):
            samplers = await cluster.start_evaluation(model_dir)
        with shown:
            await sample_chunks(config, settings, samplers, chunks, finished, stage=stage, what=what)
