"""Measures the hardware limits one by one in separate processes, after the loop's workers have ended, with as
many processes and threads as the loop's workers had.

    generation   `vllm.LLM.generate` on the prompts, seeds and lengths of timed steps; and single
                 engine steps with few and many sequences
    training     transformers and torch's AdamW on rows without padding, in the best of several micro-batch
                 sizes: a step's tokens and attention, shared prompt prefixes once
    sync         one broadcast of the same bytes, between preallocated buffers
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from grpo_dist.config import Config, RolloutConfig
from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import device_type, resolve_dtype, thread_environment
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.tools.bench.figures import MachineLimits, NeededWork
from grpo_dist.tools.bench.limit_jobs import measure_generation, measure_sync, measure_training
from grpo_dist.tools.bench.record import StepRecord
from grpo_dist.tools.bench.result import DecodeStep

if TYPE_CHECKING:
    from actors.workers.engine_settings import EngineSpec

T = TypeVar("T")

REPEATS = 3  # the fastest measurement counts
SYNC_REPEATS = 12  # each is short
_STEPS = 2  # timed steps whose requests are generated again
_DEADLINE_S = 1800.0


def generation_limit(
    config: Config, spec: EngineSpec, steps: Sequence[StepRecord], *, threads: int
) -> tuple[float, list[DecodeStep]]:
    """Measure the loop's number of engines, each with its share of a step. Returns completion tokens per
    second and single steps of the slowest engine.
    """
    workers, gpus = config.rollout.num_workers, config.rollout.tensor_parallel_size
    batches = [step.requests for step in steps[-_STEPS:]]
    jobs = [
        {
            "spec": spec,
            "temperature": config.sampling.first_temperature,
            "batches": [batch[i::workers] for batch in batches],
            "repeats": REPEATS,
        }
        for i in range(workers)
    ]
    results = run_jobs(measure_generation, jobs, threads=threads, gpus=gpus)
    tokens = sum(r.length for batch in batches for r in batch)
    slowest = [max(same, key=itemgetter(2)) for same in zip(*(f["steps"] for f in results), strict=True)]
    return tokens / fastest([f["seconds"] for f in results]), [DecodeStep(*step) for step in slowest]


def training_limit(
    config: Config, model_dir: Path, steps: Sequence[StepRecord], *, threads: int
) -> tuple[float, float, str]:
    """Measure training on all ranks. Returns tokens per second, a prompt counted once per sample; operations
    per second of a large matrix product; and the best micro-batch.
    """
    ranks = config.policy.num_workers
    works = [NeededWork.from_step(step) for step in steps]
    needed = sum(works[1:], works[0])
    requests = [r for step in steps for r in step.requests]
    row = needed.row_tokens(max(r.tokens for r in requests))
    rows = max(1, round(needed.tokens / len(steps) / ranks / row))
    job = {
        "model_dir": str(model_dir),
        "dtype": resolve_dtype(config.model.dtype),
        "rows": rows,
        "row_tokens": row,
        "trained_share": needed.trained / needed.tokens,
        "repeats": REPEATS,
    }
    results = run_jobs(measure_training, [job] * ranks, threads=threads, gpus=1)
    seconds = [f["seconds"] for f in results]
    micro = sorted({f["micro_batch"] for f in results})
    best = f"shared prompt prefixes once, micro-batches of {', '.join(f'{m} x {row}' for m in micro)} tokens"
    counted = sum(r.tokens for r in requests) / needed.tokens
    rate = rows * row * ranks * counted / fastest([[s] for s in seconds])
    return rate, sum(f["matmul"] for f in results), best


def sync_limit(rollout: RolloutConfig, num_bytes: int, *, port: int) -> float:
    """Measure bytes per second from one process to the engines' number of processes; within one GPU if there
    are too few.
    """
    from actors.transfer.connections import new_secret  # imports Ray

    processes, backend = 1 + rollout.num_workers * rollout.tensor_parallel_size, "gloo"
    if device_type() == "cuda":
        backend = "nccl" if torch.cuda.device_count() >= processes else "copy"
    processes = 1 if backend == "copy" else processes
    common = {
        "num_bytes": num_bytes,
        "world_size": processes,
        "port": port,
        "backend": backend,
        "secret": new_secret(),
    }
    jobs = [{"rank": rank, "repeats": SYNC_REPEATS, **common} for rank in range(processes)]
    seconds = run_jobs(measure_sync, jobs, threads=1, gpus=1)
    return num_bytes / fastest([[s] for s in seconds])


def fastest(seconds: list[list[list[float]]]) -> float:
    """Return the seconds for all batches, from seconds[process][batch][repeat]: the slowest process per
    repeat, the fastest repeat per batch.
    """
    batches = zip(*seconds, strict=True)
    return sum(min(max(repeat) for repeat in zip(*batch, strict=True)) for batch in batches)


def run_jobs(
    measure: Callable[..., Any], jobs: Sequence[dict[str, Any]], *, threads: int, gpus: int
) -> list[Any]:
    """Run ``measure(barrier, **job)`` for all jobs concurrently, one process each. Returns results in order.

    Raises RuntimeError with the last output of a failed process, or at once if there are too few GPUs.
    """
    devices = [devices_of(i, gpus) for i in range(len(jobs))]
    with tempfile.TemporaryDirectory(prefix="grpo-dist-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        processes = []
        for i, job in enumerate(jobs):
            (directory / f"{i}.job").write_bytes(pickle.dumps((measure, i, len(jobs), job)))
            log = stack.enter_context((directory / f"{i}.log").open("wb"))
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "grpo_dist.tools.bench.limit_jobs", name, str(i)],
                    env=os.environ | thread_environment(threads) | devices[i],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # ends an engine's child processes, too
                )
            )
        try:
            _wait(processes, measure.__name__.removeprefix("measure_"), directory)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):  # the whole process group has ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()  # bounded: it has been killed
        return [pickle.loads((directory / f"{i}.result").read_bytes()) for i in range(len(jobs))]


def devices_of(process: int, each: int) -> dict[str, str]:
    """Return environment variables that show ``each`` GPUs to process number ``process``; {} without GPUs.

    Raises RuntimeError if there are too few: without a GPU the process would compute on the CPU.
    """
    if device_type() == "cpu":
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = visible.split(",")[process * each : (process + 1) * each]
    if len(devices) < each:
        raise RuntimeError(
            f"{process + 1} processes with {each} GPU(s) each are needed, but only GPUs {visible} are visible"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def _wait(processes: Sequence[subprocess.Popen[bytes]], what: str, directory: Path) -> None:
    end = time.monotonic() + _DEADLINE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.returncode for process in processes):
            break
        time.sleep(0.05)
    for i, process in enumerate(processes):
        if process.poll() != 0:
            tail = (directory / f"{i}.log").read_text(errors="replace")[-2000:]
            state = "not finished" if process.returncode is None else f"exit code {process.returncode}"
            raise RuntimeError(f"{what}: process {i}: {state}; its output ends with: {tail}")


# All limits. A failed limit is skipped, so that the loop's figures are not lost.


def limit_threads(config: Config, cluster_gpus: int) -> dict[str, int]:
    """Return threads per process by role. ``cluster_gpus``: GPUs of the loop's workers.

    Limits are measured on this machine only. If it lacks resources, prints a warning and returns {}.
    """
    from actors.connection import local_resources
    from actors.placement.demands import placement

    has = local_resources(config.cluster)
    try:
        if cluster_gpus and not has.gpus:
            raise UserError(f"this machine has no GPUs, and the cluster has {cluster_gpus}")
        return {role: demand.threads for role, demand in placement(config, has, training=True).items()}
    except UserError as error:
        print_line(f"warning: limits are skipped, because they are measured on this machine only: {error}")
        return {}


def measured_limits(
    config: Config, model_dir: Path, steps: Sequence[StepRecord], threads: Mapping[str, int]
) -> MachineLimits:
    """Measure generation, training and weight sync with the work of ``steps``. ``threads``: per process, by
    role. A failed limit is reported and skipped.
    """
    from actors.transfer.transport import free_port  # imports Ray
    from actors.workers.engine_settings import EngineSpec

    spec, sent = EngineSpec.from_config(config, model_dir), int(steps[-1].metrics["sync/bytes"])
    generation = _attempt(
        "generation", lambda: generation_limit(config, spec, steps, threads=threads["rollout"])
    )
    training = _attempt(
        "training", lambda: training_limit(config, model_dir, steps, threads=threads["policy"])
    )
    sync = _attempt("weight sync", lambda: sync_limit(config.rollout, sent, port=free_port("127.0.0.1")))
    settings = {}
    if generation or training or sync:
        settings["repeats"] = f"the fastest of {REPEATS}, of the sync of {SYNC_REPEATS}"
        settings["step"] = "largest limit" if config.max_staleness else "sum of the limits"
    if generation:
        settings["generation"] = "vllm.LLM.generate, all requests of a step at once"
    if training:
        settings["training"] = f"transformers and torch AdamW without padding, {training[2]}"
        settings["peak"] = "a matrix product measured on the same threads"
    if sync:
        settings["sync"] = "one broadcast of all bytes"
    return MachineLimits(
        generation_tokens_per_s=generation and generation[0],
        training_tokens_per_s=training and training[0],
        sync_bytes_per_s=sync,
        matmul_flops=training and training[1],
        settings=settings,
        decode_steps=generation[1] if generation else [],
    )


def _attempt(what: str, measure: Callable[[], T]) -> T | None:
    print_line(f"limits: {what}")
    try:
        return measure()
    except RuntimeError as error:  # a process ran out of memory, for example
        print_line(f"warning: {what}: no limit was measured, and the result has none: {error}")
        return None
