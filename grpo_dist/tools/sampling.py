"""Engines and graders outside of a training run, for the length of one block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from grpo_dist.config import Config
from grpo_dist.evaluation.sampling import EvaluationHandles
from grpo_dist.runtime.concurrency import deadline


@asynccontextmanager
async def evaluation_workers(config: Config, model_dir: Path) -> AsyncIterator[EvaluationHandles]:
    """Start a cluster with the model in ``model_dir``, and stop it at the end of the block."""
    from actors.cluster import Cluster  # imports Ray

    async with Cluster(config) as cluster:
        async with deadline(
            config.cluster.timeouts.up_s, "start: engine and graders up", explain=cluster.where_stuck
        ):
            workers = await cluster.start_evaluation(model_dir)
        yield workers
