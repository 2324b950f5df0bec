"""Calibrates the times of the stages with a result of `grpo-dist bench`.

Each stage is set so that the model of it gives the benchmark's own time for the benchmark's own work; what is
planned is then another amount of work. Decoding is measured by the engine's single steps with few and many
sequences (`BenchResult.decode_steps`); what the loop's engine takes beyond these is the same for every step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.workers.engine_settings import EngineSpec
from grpo_dist.batch.sharding import COMPUTED_TOKENS
from grpo_dist.config import BatchConfig, Config, PolicyConfig
from grpo_dist.config.files import ConfigError, checked
from grpo_dist.errors import UserError
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.plan.accelerators import ClusterShape, Peaks, card_called
from grpo_dist.tools.plan.engines import Engine
from grpo_dist.tools.plan.memory import Sizes
from grpo_dist.tools.plan.models import model_of
from grpo_dist.tools.plan.placement import Roles, roles_of
from grpo_dist.tools.plan.rates import Rates, Reached, UpdateWork
from grpo_dist.tools.plan.virtual_clock import run_virtually

_TRAINED = "train/tokens"
_THREADS = 0.8  # a trainer with two threads was measured to be 1.71 times as fast as one with one
# Of a thread, float32, and bytes a second for a process. The reached share of them is calibrated. They decide
# how a decode step grows with its sequences only where single steps were not measured.
_CPU_FLOPS, _CPU_MEMORY = 90e9, 10e9
# What a calibration reads of a benchmark; other figures have a value where they are missing.
_FIGURES = (
    "generation/step_s", "training/step_s", "sync/step_s", "scoring/step_s", "overhead/step_s",
    "overhead/driver_cpu_s",
)  # fmt: skip
_WORKLOAD = ("prompt_tokens_mean", "prompts_per_step", "samples_per_prompt")
_COPIES = ("device/to_host_bytes_per_s", "device/from_host_bytes_per_s")  # in a record of `gpu-check`


@dataclass(frozen=True, slots=True)
class Calibration:
    """``workload``: what `workload_of` takes of the benchmark's; ``cpus``: of a machine without GPUs."""

    peaks: Peaks
    reached: Reached
    workload: Mapping[str, Any]
    roles: Roles
    cpus: int | None

    def peaks_of(self, roles: Roles) -> Peaks:
        """Scale the peaks to other numbers of CPU threads; GPUs keep theirs."""
        if self.cpus is None:
            return self.peaks
        peaks, before = self.peaks, self.roles
        return replace(
            peaks,
            flops=peaks.flops * (roles.policy_threads / before.policy_threads) ** _THREADS,
            engine_flops=peaks.engine_flops * (roles.engine_threads / before.engine_threads) ** _THREADS,
            thread_flops=peaks.flops / before.policy_threads**_THREADS,
        )


def calibrate(result: BenchResult, cluster: ClusterShape) -> Calibration:
    """Calibrate with ``result``. Raises UserError for other hardware, too few measurements, or settings that
    this version does not have.
    """
    _check_hardware(result, cluster)
    _check_complete(result)
    try:
        config = checked(result.config, f"its settings of {result.name}", Config)
    except ConfigError as error:
        raise UserError(
            f"--bench: this version does not take the configuration that it was measured with ({error}); "
            "measure again with this version"
        ) from error
    model, gpu = model_of(config.model, config.sft, config.seed), cluster.card is not None
    cpus = None if gpu else int(result.machine["cores"])
    roles = roles_of(config, model, _own_cluster(result, cluster), cpus=cpus)
    peaks = Peaks.from_cluster(cluster) if gpu else _cpu_peaks(result, config.policy, roles)
    figures = result.figures
    drafts = Reached(accepted=figures.get("generation/acceptance_length", 1.0))
    rates = Rates(config, model, Sizes.from_config(config, gpu=gpu), peaks, drafts)
    steps = _steps(result)
    reached = _generation(rates, steps, result)
    reached = _training(replace(rates, reached=reached), steps, result)
    samples = len(steps[0]) * config.batch.samples_per_prompt
    processes = config.rewards.num_workers * config.rewards.processes_per_worker
    reached = replace(
        reached,
        sync=_sync(rates, figures["sync/step_s"]),
        sync_s=0.0,
        score_s=figures["scoring/step_s"] * processes / samples,
        sample_s=min(Reached().sample_s, figures["overhead/driver_cpu_s"] / samples),
        overhead_s=figures["overhead/step_s"] + (0.0 if gpu else _turns_s(figures)),
        host=_host(figures, peaks),
        source=f"benchmark {result.name} on {result.machine['gpu' if gpu else 'cpu']}",
    )
    workload = {
        "prompt_tokens": round(result.workload["prompt_tokens_mean"]),
        "shared_tokens": _shared(result),
        "measured": tuple(result.lengths),
        **_episodes(figures),
    }
    return Calibration(peaks, reached, workload, roles, cpus)


def _episodes(figures: Mapping[str, float]) -> dict[str, Any]:
    """Return ``turns`` of an episode, and ``tool_s`` between two of them which add up to its waits; {} where
    samples have one turn.
    """
    turns = round(figures.get("episodes/turns", 1.0))
    if turns < 2:
        return {}
    waited_s = figures["episodes/turns"] * figures.get("episodes/tool_wait_s", 0.0)
    return {"turns": turns, "tool_s": waited_s / (turns - 1)}


def _shared(result: BenchResult) -> int:
    """Return the tokens that all prompts of the benchmark begin with, not the last one of equal prompts; 0 in
    a result that does not say.
    """
    most = round(result.workload["prompt_tokens_mean"]) - 1
    return min(round(result.workload.get("shared_prompt_tokens", 0)), most)


def _sync(rates: Rates, measured_s: float) -> float:
    """Return the share of the network with which `Rates.sync_s` gives the ``measured_s`` of the bench's own
    configuration: with ZeRO-3 it gathers the weights first, with deltas it copies them.
    """
    at_peak_s, copies_s = (
        replace(rates, reached=replace(rates.reached, sync=share, sync_s=0.0)).sync_s()
        for share in (1.0, math.inf)
    )
    return (at_peak_s - copies_s) / max(measured_s - copies_s, 0.1 * measured_s)


def _turns_s(figures: Mapping[str, float]) -> float:
    """Return the seconds of a step in changes of turns. A plan of GPUs has a model of them; on processors
    they move nothing, and the little that they take is the same for every step.
    """
    return figures.get("share/turns", 0.0) * figures.get("loop/step_s", 0.0)


def _host(figures: Mapping[str, float], peaks: Peaks) -> float:
    """Return the share of PCIe that copies to and from pinned memory reach, measured or assumed."""
    copies = [figures[name] for name in _COPIES if figures.get(name)]
    return min(copies) / peaks.host if copies else Reached().host


def generation_s(
    rates: Rates,
    groups: Sequence[tuple[int, Sequence[int]]],
    *,
    engines: int,
    capacity: int,
    shared_tokens: int = 0,
    turns: int = 1,
    tool_s: float = 0.0,
) -> tuple[float, float]:
    """Return the mean busy seconds of the engines for groups of (prompt, completions) requested at once, and
    their decode steps. ``shared_tokens``: of all prompts, in the cache. ``turns``, ``tool_s``: of each
    sample, see `Workload`; an engine counts as busy while its samples wait.
    """

    async def serve(engine: Engine, requests: Sequence[tuple[int, Sequence[int]]]) -> float:
        begin = asyncio.get_running_loop().time()
        groups = (
            engine.generate(
                prompt - shared_tokens,
                lengths,
                on_sample=lambda: None,
                cached=shared_tokens,
                turns=turns,
                tool_s=tool_s,
            )
            for prompt, lengths in requests
        )
        await asyncio.gather(*groups)
        return asyncio.get_running_loop().time() - begin

    async def session() -> tuple[float, float]:
        pool = [Engine(rates, capacity) for _ in range(engines)]
        busy = await asyncio.gather(*(serve(engine, groups[i::engines]) for i, engine in enumerate(pool)))
        return sum(busy) / engines, sum(engine.steps for engine in pool) / engines

    return run_virtually(session)


def _check_hardware(result: BenchResult, cluster: ClusterShape) -> None:
    measured, wanted = str(result.machine.get("gpu", "")), cluster.card
    card = card_called(measured)
    if (card and card.kind) != (wanted and wanted.kind) or bool(measured) != bool(wanted):
        raise UserError(
            f"--bench: measured on {result.machine.get('gpu', 'a machine without GPUs')}, and --cluster is "
            f"{cluster}; expected a benchmark of the same hardware"
        )
    if not result.lengths:
        raise UserError(
            f"--bench: {result.name} does not say how long its completions were; measure again with this "
            "version"
        )


def _check_complete(result: BenchResult) -> None:
    """Raise UserError for what the file does not have, or has no number of."""
    needed = [
        *((f"figures.{name}", result.figures.get(name)) for name in _FIGURES),
        *((f"workload.{name}", result.workload.get(name)) for name in _WORKLOAD),
        *((f"steps.{i}.{_TRAINED}", step.get(_TRAINED)) for i, step in enumerate(result.steps)),
    ]
    if "gpu" not in result.machine:
        needed.append(("machine.cores", result.machine.get("cores")))
    missing = [f"`{key}`" for key, value in needed if not isinstance(value, int | float)]
    if missing or not result.steps:
        raise UserError(
            f"--bench: {result.name} has no number for {', '.join(missing) or '`steps`'}; expected a result "
            "in which every stage was measured: run `grpo-dist bench` again with this version"
        )


def _own_cluster(result: BenchResult, cluster: ClusterShape) -> ClusterShape:
    """Return the cluster of the benchmark: one node."""
    return replace(cluster, nodes=1, gpus_per_node=int(result.machine.get("gpus", 0)))


def _cpu_peaks(result: BenchResult, policy: PolicyConfig, roles: Roles) -> Peaks:
    measured = result.figures.get("training/peak_flops", 0.0) / policy.num_workers
    rank = measured or roles.policy_threads * _CPU_FLOPS
    engine = rank * roles.engine_threads / roles.policy_threads
    return Peaks(rank, engine, _CPU_MEMORY, _CPU_MEMORY, _CPU_MEMORY, 10**6, host=_CPU_MEMORY)


def _steps(result: BenchResult) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Return the groups of each timed step: (prompt tokens, lengths of the completions)."""
    prompt, each = round(result.workload["prompt_tokens_mean"]), int(result.workload["samples_per_prompt"])
    lengths, count = result.lengths, int(result.workload["prompts_per_step"])
    groups = [(prompt, tuple(lengths[i : i + each])) for i in range(0, len(lengths), each)]
    return [groups[i : i + count] for i in range(0, len(groups), count)]


def _generation(rates: Rates, steps: list[list[tuple[int, tuple[int, ...]]]], result: BenchResult) -> Reached:
    """Calibrate decoding with the engine's single steps and with the overhead of the loop's engine."""
    curve, shared = _curve(rates, result), _shared(result)
    reached = replace(rates.reached, decode_curve=curve, step_s=0.0)
    capacity = EngineSpec.from_config(rates.config, Path()).max_num_seqs
    engines, episodes = rates.config.rollout.num_workers, _episodes(result.figures)
    how = {"engines": engines, "capacity": capacity, "shared_tokens": shared, **episodes}
    alone = [generation_s(replace(rates, reached=reached), groups, **how) for groups in steps]
    predicted, engine_steps = (sum(column) / len(steps) for column in zip(*alone, strict=True))
    measured = result.figures["generation/step_s"]
    if curve and measured > predicted:
        return replace(reached, step_s=(measured - predicted) / engine_steps)
    prefill = (
        sum(rates.prefill_s(prompt - shared) for step in steps for prompt, _ in step) / len(steps) / engines
    )
    others = prefill + (episodes["turns"] - 1) * episodes["tool_s"] if episodes else prefill
    factor = max(measured - others, 0.1 * measured) / (predicted - others)
    return replace(reached, decode_curve=tuple((n, f * factor) for n, f in curve or ((1.0, 1.0),)))


def _curve(rates: Rates, result: BenchResult) -> tuple[tuple[float, float], ...]:
    by_count: dict[int, list[float]] = {}
    for step in result.decode_steps:
        at = step.seconds / rates.decode_roofline_s(step.sequences, step.sequences * step.context)
        by_count.setdefault(step.sequences, []).append(at)
    return tuple((float(n), float(np.mean(values))) for n, values in sorted(by_count.items()))


def _training(rates: Rates, steps: list[list[tuple[int, tuple[int, ...]]]], result: BenchResult) -> Reached:
    """Calibrate the share of the peak that training reaches."""
    trained = sum(s[_TRAINED] for s in result.steps) / sum(p * len(n) + sum(n) for s in steps for p, n in s)
    at_peak = replace(rates, reached=replace(rates.reached, training=1.0))
    work = [_updates(rates.config.batch, step, _shared(result)) for step in steps]
    compute = sum(at_peak.compute_s(step_work) for step_work in work) / len(steps)
    others = sum(at_peak.update_s(step_work) for step_work in work) / len(steps) - compute
    computed = compute * trained * _computed_share(rates, work, trained, result)
    share = computed / max(result.figures["training/step_s"] - others, 1e-9)
    return replace(rates.reached, training=share)


def _computed_share(
    rates: Rates, work: Sequence[Sequence[UpdateWork]], trained: float, result: BenchResult
) -> float:
    """Return how much of the tokens of ``work``, of which a share was ``trained``, the bench computed: less
    than all where prompts of some groups begin alike.
    """
    seen = [step[COMPUTED_TOKENS] for step in result.steps if COMPUTED_TOKENS in step]
    if not rates.config.model.packing or len(seen) < len(work):
        return 1.0
    streams = sum(sum(map(rates.stream_tokens, step_work)) / len(step_work) for step_work in work)
    return min(1.0, sum(seen) / (streams * trained))


def _updates(
    batch: BatchConfig, groups: Sequence[tuple[int, tuple[int, ...]]], shared: int
) -> list[UpdateWork]:
    size = len(groups) // batch.updates_per_step
    return [UpdateWork(tuple(groups[i : i + size]), shared) for i in range(0, len(groups), size)]
