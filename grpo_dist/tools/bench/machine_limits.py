"""All limits that a benchmark is held against, each left out where it cannot be measured.

The steps of the loop are measured by then, and their figures must not be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.tools.bench.figures import StageLimits
from grpo_dist.tools.bench.limits import REPEATS, SYNC_REPEATS, generation_limit, sync_limit, training_limit
from grpo_dist.tools.bench.record import StepRecord
from grpo_dist.tools.bench.result import DecodeStep

T = TypeVar("T")


@dataclass(frozen=True)
class MachineLimits:
    """``matmul_flops``: operations per second of a matrix product on the policy's threads, None where
    training was not measured; ``decode_steps``: single steps of an engine.
    """

    stages: StageLimits | None = None
    matmul_flops: float | None = None
    decode_steps: list[DecodeStep] = field(default_factory=list)


def limit_threads(config: Config, cluster_gpus: int) -> dict[str, int]:
    """Return the threads of a process by role. ``cluster_gpus``: of the loop's workers.

    Limits are measured on this machine alone: where it has not what they take, print that, and return {}.
    """
    from actors.connection import local_resources  # imports Ray
    from actors.placement.demands import placement

    has = local_resources(config.cluster)
    try:
        if cluster_gpus and not has.gpus:
            raise UserError(f"this machine has no GPUs, and the cluster has {cluster_gpus}")
        return {role: demand.threads for role, demand in placement(config, has, training=True).items()}
    except UserError as error:
        print_line(f"warning: limits are measured on this machine alone, and are left out: {error}")
        return {}


def measured_limits(
    config: Config, model_dir: Path, steps: Sequence[StepRecord], threads: Mapping[str, int]
) -> MachineLimits:
    """Measure generation, training and weight sync at the work of ``steps``. ``threads``: of a process, by
    role. A limit that fails is printed and left out.
    """
    from actors.transfer.transport import free_port  # imports Ray
    from actors.workers.engine_settings import EngineSpec

    spec, rollout = EngineSpec.from_config(config, model_dir), config.rollout
    temperature, own = config.sampling.first_temperature, threads["rollout"]
    generation = _attempted(
        "generation",
        lambda: generation_limit(spec, rollout, temperature, steps, threads=own),
    )
    training = _attempted(
        "training",
        lambda: training_limit(config.model, config.policy, model_dir, steps, threads=threads["policy"]),
    )
    sent = int(steps[-1].metrics["sync/bytes"])
    sync = _attempted("weight sync", lambda: sync_limit(rollout, sent, port=free_port("127.0.0.1")))
    settings = {"repeats": f"the fastest of {REPEATS}, of the sync of {SYNC_REPEATS}"}
    if generation:
        settings["generation"] = "vllm.LLM.generate, all requests of a step at once"
    if training:
        settings["training"] = f"transformers and torch AdamW without padding, {training[2]}"
        settings["peak"] = "a matrix product measured on the same threads"
    if sync:
        settings["sync"] = "one broadcast of all bytes"
    settings["step"] = "largest limit" if config.max_staleness else "sum of the limits"
    rates = (generation and generation[0], training and training[0], sync)
    return MachineLimits(
        StageLimits(*rates, settings) if any(rates) else None,
        training[1] if training else None,
        generation[1] if generation else [],
    )


def _attempted(what: str, measure: Callable[[], T]) -> T | None:
    print_line(f"limits: {what}")
    try:
        return measure()
    except RuntimeError as error:  # of a process that ran out of memory, for example
        print_line(f"warning: {what}: no limit was measured, and the result has none: {error}")
        return None
