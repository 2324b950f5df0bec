"""Runs one benchmark: the real loop on the real actors, then the limits.

start | warm-up steps | timed steps | end of the workers | limits: generation, training, sync | result
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from grpo_dist import driver
from grpo_dist.batch.shared_prefixes import common_length
from grpo_dist.config import BatchConfig, BenchConfig, Config
from grpo_dist.config.secrets import masked
from grpo_dist.errors import as_user_errors, expanded
from grpo_dist.observe.console import step_line
from grpo_dist.runs.prepare import RunInputs
from grpo_dist.runs.run_directory import check_writable, make_free_directory, set_template_date
from grpo_dist.runs.start import load_inputs
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.hardware import device_type, resolve_dtype
from grpo_dist.runtime.stage_log import print_line, stage
from grpo_dist.tools.bench.figures import MachineLimits, figures
from grpo_dist.tools.bench.flops import Shape, card_peak
from grpo_dist.tools.bench.lengths import ForcedLengths
from grpo_dist.tools.bench.limits import limit_threads, measured_limits
from grpo_dist.tools.bench.record import BenchRecorder, NoCheckpoints, StepRecord
from grpo_dist.tools.bench.result import ActorMemory, BenchResult, machine_facts
from grpo_dist.tools.bench.table import print_result


def bench(config: Config) -> Path:
    """Measure ``config`` and return the directory of the result. Raises UserError for invalid input."""
    with stage("actors", "their code is loaded"):
        from actors.connection import fit

    config = set_template_date(make_benchmark_config(config))
    with as_user_errors():
        base = expanded(config.output_dir) / config.name
        check_writable(base.parent)
        has = fit(config)
        inputs = load_inputs(config, print_line, device="cuda" if has.gpus else "cpu")
        threads = limit_threads(config, has.gpus) if config.bench.limits else {}
        directory = make_free_directory(base)  # fails before the measurement, which takes minutes
    with _removed_without_result(directory):
        steps = timed(config.bench, asyncio.run(_loop(config, inputs, directory)))
        limits = measured_limits(config, inputs.model_dir, steps, threads) if threads else MachineLimits()
        result = measured(config, inputs.model_dir, steps, limits)
    result.write(directory / "bench.json")
    print_result(result)
    print_line(f"written: {directory}/bench.json")
    return directory


@contextmanager
def _removed_without_result(directory: Path) -> Iterator[None]:
    """Delete ``directory`` if the measurement fails and left it empty."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the directory is not empty
            directory.rmdir()
        raise


def make_benchmark_config(config: Config) -> Config:
    """Return ``config`` with the benchmark's steps, without evaluations and checkpoints. If sampling runs
    ahead, the last steps sample nothing and are not timed.
    """
    steps = config.bench.warmup_steps + config.bench.steps + config.max_staleness
    evaluation = config.evaluation.model_copy(update={"before": False, "after": False, "every": 0})
    checkpoint = config.checkpoint.model_copy(update={"every": 0, "export": False, "resume": "never"})
    health = config.health.model_copy(update={"min_signal_groups": 0})  # every step does the same work
    tracking = config.tracking.model_copy(update={"samples": False})
    sampling = config.sampling.at_its_longest
    parts = {"evaluation": evaluation, "checkpoint": checkpoint, "health": health, "tracking": tracking}
    parts |= {"sampling": sampling}
    return config.model_copy(update={"steps": steps} | parts)


def timed(bench: BenchConfig, steps: Sequence[StepRecord]) -> list[StepRecord]:
    warmup = bench.warmup_steps
    return list(steps[warmup : warmup + bench.steps])


async def _loop(config: Config, inputs: RunInputs, directory: Path) -> list[StepRecord]:
    from actors.cluster import Cluster  # imports Ray

    async with Cluster(config, inputs.teacher_dirs) as cluster:
        async with deadline(config.cluster.timeouts.up_s, "start: actors up and models loaded"):
            workers = await cluster.start_training(inputs.model_dir)
        recorder = BenchRecorder(config.seed, directory, lambda step, m: print_line(step_line(step, m)))
        forced = replace(workers, rollouts=ForcedLengths(workers.rollouts, config.bench.lengths))
        beside = inputs.demonstrations
        await driver.run(config, forced, inputs.prompts, [], recorder, NoCheckpoints(), demonstrations=beside)
    return recorder.steps


def measured(
    config: Config,
    model_dir: Path,
    steps: Sequence[StepRecord],
    limits: MachineLimits,
) -> BenchResult:
    """Return the result of the timed ``steps``."""
    peak, settings = limits.matmul_flops, limits.settings
    if card := _half_precision_peak(config.model.dtype):
        peak, settings = card * config.policy.num_workers, settings | {"peak": "data sheet"}
    values = figures(
        steps,
        shape=Shape.from_model_dir(model_dir),
        peak_flops=peak,
        limits=limits,
        overlapped=config.max_staleness > 0,
        frozen=config.policy.lora is not None,
    )
    return BenchResult(
        name=config.name,
        config=masked(config.model_dump(mode="json")),
        machine=machine_facts(),
        workload=_workload(config.batch, config.max_staleness, steps),
        figures=values,
        limit_settings=settings,
        actors=[ActorMemory(name, u.peak_bytes, u.peak_gpu_bytes) for name, u in steps[-1].usage.items()],
        steps=[_step_figures(step) for step in steps],
        lengths=[request.length for step in steps for request in step.requests],
        decode_steps=limits.decode_steps,
    )


def _half_precision_peak(dtype: Literal["auto", "float32", "bfloat16"]) -> float | None:
    """Return the data sheet's operations per second of this machine's GPU; None if the model computes in
    float32, or the card is unknown.
    """
    if device_type() == "cpu" or resolve_dtype(dtype, "cuda") == torch.float32:
        return None
    return card_peak(torch.cuda.get_device_name(0))


def _workload(batch: BatchConfig, max_staleness: int, steps: Sequence[StepRecord]) -> dict[str, float]:
    requests = [r for step in steps for r in step.requests]
    prompts = [r.prompt_ids for r in requests]
    return {
        "steps": len(steps),
        "prompts_per_step": batch.prompts_per_step,
        "samples_per_prompt": batch.samples_per_prompt,
        "prompt_tokens_mean": sum(map(len, prompts)) / len(prompts),
        # The first and last samples in order share least.
        "shared_prompt_tokens": common_length(np.array(min(prompts)), np.array(max(prompts))),
        "completion_tokens": sum(r.length for r in requests),
        "completion_tokens_mean": sum(r.length for r in requests) / len(requests),
        "completion_tokens_max": max(r.length for r in requests),
        "max_staleness": max_staleness,
    }


def _step_figures(step: StepRecord) -> dict[str, float]:
    """Return a step's seconds, with its time, memory and work metrics."""
    prefixes = ("time/", "memory/", "throughput/", "sync/", "train/", "rollout/")
    of_step: dict[str, Any] = {"step": float(step.step), "seconds": step.seconds}
    return of_step | {key: value for key, value in step.metrics.items() if key.startswith(prefixes)}
