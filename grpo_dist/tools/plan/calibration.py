"""Calibrates stage times with a result of `grpo-dist bench`.

Each stage's model is fitted to give the benchmark's time for the benchmark's work; a plan then changes the
amount of work. Decoding is fitted to single engine steps with few and many sequences
(`BenchResult.decode_steps`); the loop's engine adds a constant overhead per step.
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
_THREADS = 0.8  # measured: two trainer threads are 1.71 times as fast as one
# Peak float32 operations per second of a thread, and bytes per second of a process; the achieved share is
# calibrated. They shape decode times only if single steps were not measured.
_CPU_FLOPS, _CPU_MEMORY = 90e9, 10e9
# Figures that a calibration needs; other figures have defaults.
_FIGURES = (
    "generation/step_s", "training/step_s", "sync/step_s", "scoring/step_s", "overhead/step_s",
    "overhead/driver_cpu_s",
)  # fmt: skip
_WORKLOAD = ("prompt_tokens_mean", "prompts_per_step", "samples_per_prompt")
_COPIES = ("device/to_host_bytes_per_s", "device/from_host_bytes_per_s")  # from a record of `gpu-check`


@dataclass(frozen=True, slots=True)
class Calibration:
    """``workload``: arguments of `workload_of` from the benchmark; ``cpus``: of a machine without GPUs."""

    peaks: Peaks
    reached: Reached
    workload: Mapping[str, Any]
    roles: Roles
    cpus: int | None

    def peaks_of(self, roles: Roles) -> Peaks:
        """Scale the peaks to other numbers of CPU threads; GPU peaks do not change."""
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
    """Calibrate with ``result``. Raises UserError for other hardware, missing measurements, or settings
    unknown to this version.
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
        overhead_s=figures["overhead/step_s"] + (0.0 if gpu else _role_switch_s(figures)),
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
    """Return ``turns`` per episode, and ``tool_s`` between turns, which add up to its waits; {} if samples
    have one turn.
    """
    turns = round(figures.get("episodes/turns", 1.0))
    if turns < 2:
        return {}
    waited_s = figures["episodes/turns"] * figures.get("episodes/tool_wait_s", 0.0)
    return {"turns": turns, "tool_s": waited_s / (turns - 1)}


def _shared(result: BenchResult) -> int:
    """Return the length of the benchmark prompts' common prefix, without the last token of equal prompts; 0
    if the result does not have it.
    """
    most = round(result.workload["prompt_tokens_mean"]) - 1
    return min(round(result.workload.get("shared_prompt_tokens", 0)), most)


def _sync(rates: Rates, measured_s: float) -> float:
    """Return the network share for which `Rates.sync_s` gives ``measured_s`` in the benchmark's
    configuration: ZeRO-3 gathers the weights first, deltas copy them.
    """
    at_peak_s, copies_s = (
        replace(rates, reached=replace(rates.reached, sync=share, sync_s=0.0)).sync_s()
        for share in (1.0, math.inf)
    )
    return (at_peak_s - copies_s) / max(measured_s - copies_s, 0.1 * measured_s)


def _role_switch_s(figures: Mapping[str, float]) -> float:
    """Return the seconds per step for role switches. GPU plans model them; on CPUs switches move nothing and
    take a small constant time.
    """
    return figures.get("share/turns", 0.0) * figures.get("loop/step_s", 0.0)


def _host(figures: Mapping[str, float], peaks: Peaks) -> float:
    """Return the achieved share of PCIe for copies to and from pinned memory, measured or assumed."""
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
    """Return the engines' mean busy seconds and decode steps for groups of (prompt, completions) requested at
    once. ``shared_tokens``: cached prefix of all prompts. ``turns``, ``tool_s``: per sample, see `Workload`;
    an engine counts as busy while its samples wait.
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
    """Raise UserError for missing or non-numeric figures."""
    required = [
        *((f"figures.{name}", result.figures.get(name)) for name in _FIGURES),
        *((f"workload.{name}", result.workload.get(name)) for name in _WORKLOAD),
        *((f"steps.{i}.{_TRAINED}", step.get(_TRAINED)) for i, step in enumerate(result.steps)),
    ]
    if "gpu" not in result.machine:
        required.append(("machine.cores", result.machine.get("cores")))
    absent = [f"`{key}`" for key, value in required if not isinstance(value, int | float)]
    if absent or not result.steps:
        raise UserError(
            f"--bench: {result.name} has no number for {', '.join(absent) or '`steps`'}; expected a result "
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
    """Return the groups per timed step: (prompt tokens, completion lengths)."""
    prompt, each = round(result.workload["prompt_tokens_mean"]), int(result.workload["samples_per_prompt"])
    lengths, count = result.lengths, int(result.workload["prompts_per_step"])
    groups = [(prompt, tuple(lengths[i : i + each])) for i in range(0, len(lengths), each)]
    return [groups[i : i + count] for i in range(0, len(groups), count)]


def _generation(rates: Rates, steps: list[list[tuple[int, tuple[int, ...]]]], result: BenchResult) -> Reached:
    """Calibrate decoding with single engine steps and the overhead of the loop's engine."""
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
    """Calibrate the achieved share of the peak in training."""
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
    """Return the computed share of the tokens in ``work``, of which a share was ``trained``. It is below 1 if
    prompts share prefixes.
    """
    computed_tokens = [step[COMPUTED_TOKENS] for step in result.steps if COMPUTED_TOKENS in step]
    if not rates.config.model.packing or len(computed_tokens) < len(work):
        return 1.0
    streams = sum(sum(map(rates.stream_tokens, step_work)) / len(step_work) for step_work in work)
    return min(1.0, sum(computed_tokens) / (streams * trained))


def _updates(
    batch: BatchConfig, groups: Sequence[tuple[int, tuple[int, ...]]], shared: int
) -> list[UpdateWork]:
    size = len(groups) // batch.updates_per_step
    return [UpdateWork(tuple(groups[i : i + size]), shared) for i in range(0, len(groups), size)]
