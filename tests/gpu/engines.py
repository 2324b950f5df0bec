"""Engines: one in this process starts, samples, sleeps and wakes; one on a cluster is killed; one over two
GPUs agrees with the trainer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from grpo_dist.batch.rows import make_batch
from grpo_dist.config import ClusterConfig, Config, SamplingConfig
from grpo_dist.loop.sync_probe import BOUNDS
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.hardware import device_type
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.models import model_of
from grpo_dist.types import Group, Prompt, Rollout, Sampling
from tests.gpu.findings import Findings
from tests.gpu.process import CheckTask
from tests.gpu.sizes import dtype_of, engine_sections
from tests.gpu.trainer_job import TrainerSections, model_dir_of, trainer_logprobs, trainer_sections

if TYPE_CHECKING:
    from actors.workers.engine_settings import EngineSpec

_TOKENS, _TOKENS_REHEARSED = 128, 12
_AT_ONCE = 16
_SHARE = 0.3  # share of the GPU's memory for the engine
_ALONE = "one request at a time: the same kernels on the same shapes"

PROMPT = Prompt("p", np.arange(7, 16, dtype=np.int32), "", "gpu-check")  # less than a block of the cache
_INTO_S = 0.05  # seconds into the second sampling, when the engine is killed
_TOKENS_KILLED = 512  # tokens of the sample, more than any engine makes in that time
_SEEDS = (1, 2, 3, 4)


def engine_config(task: CheckTask, *, eager: bool, tokens: int | None = None, **rollout: Any) -> Config:
    """Return a configuration for sampling with one engine. ``tokens``: per sample; None: a few."""
    tokens = tokens or (_TOKENS_REHEARSED if task.rehearsal else _TOKENS)
    sections = engine_sections(task, dtype=dtype_of(task), eager=eager)
    memory = {} if task.rehearsal else {"gpu_memory_utilization": _SHARE}
    return Config.model_validate(
        {
            "name": "gpu-check",
            "model": sections["model"],
            "data": {"train": [{"path": "demo:add3"}], "max_prompt_tokens": 64},
            "sampling": {"max_new_tokens": tokens},
            "rollout": sections["rollout"] | memory | rollout,
        }
    )


def engine(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    from actors.workers.engine_settings import EngineSpec  # needs vLLM, which other lines do not

    eager = task.argument == "eager"
    config = engine_config(task, eager=eager)
    model_dir = Path(model_dir_of(config.model, config.seed))
    weights = 2 * model_of(config.model, config.sft, config.seed).parameters
    spec = EngineSpec.from_config(config, model_dir, colocated=device_type() == "cuda")
    if eager:
        yield "engine-eager", asyncio.run(_eager(spec, config.sampling, weights))
        return
    yield from asyncio.run(_graphs(spec, config.sampling, weights)).items()


async def _eager(spec: EngineSpec, sampling: SamplingConfig, weights: int) -> Findings:
    findings = Findings()
    engine = await _start(spec, findings, "engine-eager")
    alone = await _sample(engine, sampling, [1])
    findings.equal("tokens of a request", len(alone[0].completion_ids), sampling.longest, "asked")
    if device_type() == "cuda":
        await _sleep(engine, weights, findings, "engine-eager", keep_weights=True)
        again = await _sample(engine, sampling, [1])
        findings.true("the same tokens after sleep and wake", same(alone, again), "the weights were kept")
    await engine.close()
    return findings


async def _graphs(spec: EngineSpec, sampling: SamplingConfig, weights: int) -> dict[str, Findings]:
    started, seeds = Findings(), Findings()
    engine = await _start(spec, started, "engine-graphs")
    first = await _sample(engine, sampling, [1])
    started.equal("tokens of a request", len(first[0].completion_ids), sampling.longest, "asked")
    again, other = await _sample(engine, sampling, [1]), await _sample(engine, sampling, [2])
    seeds.true("the same seed, the same tokens", same(first, again), _ALONE)
    seeds.true("another seed, other tokens", not same(first, other), "each sample has its own seed")
    many = range(100, 100 + _AT_ONCE)
    begin = time.perf_counter()
    batch = await _sample(engine, sampling, many)
    seconds = time.perf_counter() - begin
    repeated = await _sample(engine, sampling, many)
    tokens = sum(len(r.completion_ids) for r in batch)
    equal = sum(same([a], [b]) for a, b in zip(batch, repeated, strict=True)) / _AT_ONCE
    seeds.figures |= {"seeds/same_in_batches": equal, "engine-graphs/tokens_per_s": tokens / seconds}
    seeds.notes.append(
        f"{_AT_ONCE} at once: {written(equal, '%')} the same again, as their kernels may differ"
    )
    started.notes.append(f"{_AT_ONCE} at once: {written(tokens / seconds, 'tokens/s')}")
    seeds.equal("different samples of one prompt", len({r.completion_ids.tobytes() for r in batch}), _AT_ONCE,
                "random weights: no two samples of so many tokens are alike")  # fmt: skip
    if device_type() == "cuda":
        await _sleep(engine, weights, started, "engine-graphs", keep_weights=False)
    await engine.close()
    return {"engine-graphs": started, "seeds": seeds}


async def _start(spec: EngineSpec, findings: Findings, name: str) -> Any:
    """Start the engine as a colocated rollout worker does, without an actor."""
    from actors.workers.rollout import RolloutWorker  # as in `measure`

    engine = RolloutWorker(spec)
    begin = time.perf_counter()
    await engine.start()
    findings.figures[f"{name}/start_s"] = time.perf_counter() - begin
    findings.notes.append(f"started in {written(time.perf_counter() - begin, 's')}")
    return engine


async def _sample(engine: Any, settings: SamplingConfig, seeds: Sequence[int]) -> list[Rollout]:
    tokens = settings.longest
    sampling = Sampling(max_new_tokens=tokens, lengths=(tokens,) * len(seeds))
    return list(await engine.sample(PROMPT, list(seeds), sampling))


async def _sleep(engine: Any, weights: int, findings: Findings, name: str, *, keep_weights: bool) -> None:
    """Claim that the engine, with ``weights`` bytes of weights, frees its memory and reclaims it."""
    awake = torch.cuda.mem_get_info()[0]
    begin = time.perf_counter()
    await engine.sleep(keep_weights)
    slept = time.perf_counter()
    freed = torch.cuda.mem_get_info()[0] - awake
    await engine.wake_up(None)
    findings.figures |= {
        f"{name}/sleep_s": slept - begin,
        f"{name}/wake_s": time.perf_counter() - slept,
        f"{name}/freed_bytes": float(freed),
    }
    sleep_s, wake_s = (written(findings.figures[f"{name}/{part}_s"], "s") for part in ("sleep", "wake"))
    findings.notes.append(f"{written(freed, 'B')} freed in {sleep_s}, taken again in {wake_s}")
    total = torch.cuda.get_device_properties(0).total_memory
    # The engine's share holds weights, cache and a step's activations.
    expected = 0.5 * (_SHARE * total - weights) + weights
    findings.at_least("bytes freed asleep", freed, expected, "the weights, and most of the engine's share")


@asynccontextmanager
async def sampling_engines(config: Config) -> AsyncIterator[Any]:
    """Yield the handle of the engines of ``config``."""
    from actors.cluster import Cluster  # needs Ray, which other jobs do not

    async with Cluster(config) as cluster:
        async with deadline(config.cluster.timeouts.up_s, "start: engines up and models loaded"):
            samplers = await cluster.start_evaluation(Path(model_dir_of(config.model, config.seed)))
        yield samplers.rollouts


async def request_samples(
    rollouts: Any, cluster: ClusterConfig, settings: SamplingConfig, seeds: Sequence[int]
) -> list[Rollout]:
    """Return a sample of `PROMPT` for each of ``seeds``, each with `sampling.max_new_tokens` tokens."""
    tokens, limit_s = settings.longest, cluster.timeouts.sample_s
    sampling = Sampling(max_new_tokens=tokens, lengths=(tokens,) * len(seeds))
    async with deadline(limit_s, "samples of the check"):
        return list(await (await rollouts.sample(PROMPT, seeds=list(seeds), sampling=sampling)))


def same(a: Sequence[Rollout], b: Sequence[Rollout]) -> bool:
    """Return whether the samples have the same tokens."""
    return all(np.array_equal(x.completion_ids, y.completion_ids) for x, y in zip(a, b, strict=True))


def replace(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    yield "replace", asyncio.run(_replace_engine(task))


async def _replace_engine(task: CheckTask) -> Findings:
    findings, config = Findings(), engine_config(task, eager=True, tokens=_TOKENS_KILLED)
    async with sampling_engines(config) as rollouts:
        before = await request_samples(rollouts, config.cluster, config.sampling, [1])
        pending = asyncio.create_task(
            request_samples(rollouts, config.cluster, config.sampling, [1]), name="samples of a killed engine"
        )
        await asyncio.sleep(_INTO_S)
        begin = time.perf_counter()
        engines = _engine_processes()
        for process in engines:
            os.kill(process, signal.SIGKILL)
        after = await pending  # bounded: by the deadline of `request_samples`
        findings.figures["replace/sampled_again_s"] = time.perf_counter() - begin
        seconds = written(findings.figures["replace/sampled_again_s"], "s")
        findings.notes.append(f"samples of the new engine {seconds} after the kill")
        findings.equal("engines killed", len(engines), 1, "the only one")
        findings.equal("engines replaced", rollouts.team.restarted(), 1, "it was lost once")
        findings.true("the same samples from the new engine", same(before, after), "the same seed, alone")
    return findings


def _engine_processes() -> list[int]:
    """Return the process ids of the engines' actors that Ray started for this process."""
    pids = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:  # it has ended
            continue
        if title.startswith("ray::RolloutWorker"):
            pids.append(process.pid)
    return pids


def tensor_parallel(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    findings = Findings()
    # An engine on a CPU has no tensor parallelism; the rest is the same.
    config = engine_config(task, eager=True, tensor_parallel_size=1 if task.rehearsal else 2)
    rollouts = asyncio.run(_samples(sampling_engines(config), config.cluster, config.sampling, findings))
    bound, why = BOUNDS[dtype_of(task)], "the sync probe's bound"
    apart = _differences(trainer_sections(config), rollouts, longest=config.sampling.longest)
    findings.at_most("log-probs of trainer and engine: nats a token", float(np.abs(apart).mean()), bound, why)
    yield "tensor-parallel", findings


async def _samples(
    engines: AbstractAsyncContextManager[Any],
    cluster: ClusterConfig,
    sampling: SamplingConfig,
    findings: Findings,
) -> list[Rollout]:
    begin = time.perf_counter()
    async with engines as rollouts:
        findings.figures["tensor-parallel/start_s"] = time.perf_counter() - begin
        samples = await request_samples(rollouts, cluster, sampling, _SEEDS)
        one, again = [await request_samples(rollouts, cluster, sampling, [1]) for _ in range(2)]
        findings.true("the same seed, the same tokens", same(one, again), "one request at a time")
    return samples


def _differences(sections: TrainerSections, rollouts: Sequence[Rollout], *, longest: int) -> np.ndarray:
    """Return trainer - engine of every sampled token, in nats."""
    rewards = np.zeros(len(rollouts), np.float32)
    group = Group(PROMPT, tuple(rollouts), rewards, {}, ("",) * len(rollouts))
    batch = make_batch([group], [rewards], ref_logprobs=None, max_new_tokens=longest)
    gaps: np.ndarray = trainer_logprobs(sections, batch) - batch.policy.rollout_logprobs.numpy()
    return gaps[batch.policy.mask.numpy()]
