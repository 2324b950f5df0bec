"""New weights for the engines, and for the reference when it is due."""

from __future__ import annotations

from collections.abc import Callable

from grpo_dist.algorithms.schedules import is_due
from grpo_dist.config import ReferenceConfig
from grpo_dist.loop.pipeline import Pipeline
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.workers import Workers


async def publish(
    version: int,
    settings: ReferenceConfig,
    workers: Workers,
    pipeline: Pipeline,
    timer: Stopwatch,
    stop_requested: Callable[[], bool],
) -> dict[str, float]:
    """Drain, push ``version`` to the engines, and refresh the reference if it is due; return metrics.

    A run that is asked to stop does not wait for the drain, and pushes only if it is done. If the reference
    is due, it waits: a checkpoint after a refresh must have the new one.
    """
    refreshes = workers.reference_sync is not None and is_due(version, settings.refresh_every)
    metrics: dict[str, float] = {}
    with timer("drain"):
        drained = await (pipeline.settle() if refreshes else pipeline.settle(unless=stop_requested))
    with timer("sync"):
        if drained:
            metrics = await workers.sync.push(version=version)
    if workers.reference_sync and refreshes:
        with timer("reference"):
            await pipeline.renew_reference(workers.reference_sync.refresh)
    return metrics
