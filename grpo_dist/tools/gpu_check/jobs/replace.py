"""An engine is killed while it samples: it is replaced, and the samples are the same."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import psutil

from grpo_dist.tools.bench.table import written
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.jobs.engine import engine_config
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.sampling import same, sampled, sampling_engines

_INTO_S = 0.05  # of the second sampling, when the engine is killed
_TOKENS = 512  # of the sample: no engine makes so many in that time


def measure(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    yield "replace", asyncio.run(_replaced(task))


async def _replaced(task: CheckTask) -> Findings:
    found, config = Findings(), engine_config(task, eager=True, tokens=_TOKENS)
    async with sampling_engines(config) as rollouts:
        before = await sampled(rollouts, config.cluster, config.sampling, [1])
        pending = asyncio.create_task(
            sampled(rollouts, config.cluster, config.sampling, [1]), name="samples of a killed engine"
        )
        await asyncio.sleep(_INTO_S)
        begin = time.perf_counter()
        engines = _engine_processes()
        for process in engines:
            os.kill(process, signal.SIGKILL)
        after = await pending  # bounded: by the deadline of `sampled`
        found.figures["replace/sampled_again_s"] = time.perf_counter() - begin
        seconds = written(found.figures["replace/sampled_again_s"], "s")
        found.notes.append(f"samples of the new engine {seconds} after the kill")
        found.equal("engines killed", len(engines), 1, "the only one")
        found.equal("engines replaced", rollouts.team.restarted(), 1, "it was lost once")
        found.true("the same samples from the new engine", same(before, after), "the same seed, alone")
    return found


def _engine_processes() -> list[int]:
    """Return the engines' actors, which Ray started for this process."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:  # it has ended
            continue
        if title.startswith("ray::RolloutWorker"):
            found.append(process.pid)
    return found
