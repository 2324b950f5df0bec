"""Three steps of the real loop: agreement of engine and trainer, their turns on the GPU, and weight sync."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from grpo_dist import driver
from grpo_dist.config import Config
from grpo_dist.health import BAD_WEIGHTS, SKIPPED
from grpo_dist.loop.sync_probe import BOUNDS
from grpo_dist.observe.console import step_line
from grpo_dist.runs.start import load_inputs
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.hardware import device_type, resolve_dtype
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.tools.bench.record import BenchRecorder, NoCheckpoints, StepRecord
from grpo_dist.tools.bench.run import bench
from grpo_dist.tools.bench.table import FIGURES, show, written
from grpo_dist.tools.plan.models import model_of
from tests.gpu.findings import Findings
from tests.gpu.process import CheckTask
from tests.gpu.sizes import SHAPE_OF, dtype_of, engine_sections, update_size
from tests.gpu.updates import offload_parts

T = TypeVar("T")

STEPS = 3


@dataclass(frozen=True, slots=True)
class LoopSize:
    prompts: int  # per step
    samples: int  # per prompt
    completion: int  # tokens per sample


_SIZES = {False: LoopSize(16, 8, 256), True: LoopSize(2, 4, 12)}  # by whether it is a rehearsal


def loop_config(task: CheckTask, *, dtype: str, **sections: dict[str, Any]) -> Config:
    """Return the configuration of a colocated run with random weights. Every step is probed, and no probe
    ends the run: the lines judge the results. A high learning rate exposes an engine with old weights.
    """
    size, engine = _SIZES[task.rehearsal], engine_sections(task, dtype=dtype, eager=dtype == "float32")
    base: dict[str, dict[str, Any]] = {
        "model": engine["model"],
        "data": {
            "train": [{"path": "demo:add3", "split": "train"}],
            "instruction": "Solve",
            "max_prompt_tokens": 32,
        },
        "batch": {
            "prompts_per_step": size.prompts,
            "samples_per_prompt": size.samples,
            "micro_batch_tokens": update_size(task, dtype=dtype, zero_stage=1).micro_batch,
        },
        "sampling": {"max_new_tokens": size.completion},
        "rewards": {"functions": [{"function": "parity"}]},
        "policy": {"zero_stage": 1, "optimizer": {"lr": 1e-3}},
        "rollout": engine["rollout"],
        "weight_sync": {"probe_every": 1, "probe_above": 1e9},
        "evaluation": {"before": False, "after": False},
        "checkpoint": {"every": 0, "export": False, "resume": "never"},
        "health": {"min_signal_groups": 0},
        "tracking": {"samples": False},
        "cluster": {"placement": "colocated"},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return Config.model_validate(
        {"name": "gpu-check", "output_dir": str(task.directory), "steps": STEPS, **base}
    )


_KEPT = ("loop/", "generation/", "training/", "sync/", "of_limit/", "share/", "limit/")
_SHOWN = (
    "loop/tokens_per_s", "of_limit/generation", "of_limit/training", "of_limit/sync", "loop/step_over_limit",
)  # fmt: skip
_STAGE = "the same work without the loop; at half its speed the loop takes a slow path"
_TURN = "time/turn_"
_OFFLOAD, _OFFLOAD_PART, _BUSY = f"{_TURN}policy_offload_s", "time/policy_offload_", "_busy_s"
_SYNC = ("stop", "travel", "take")  # parts of a weight sync, without the turns before and after it
_PROBE, _UPDATE = "probe/logprob_diff_mean", "mismatch/logprob_diff_mean"
_TELLING = 2  # number of steps after which engines have received updated weights


def loop(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    """Yield the lines after the second step, the first with updated weights, and again after each later one.
    `steps` follows once the loop and its workers have ended.
    """
    dtype = "float32" if task.argument == "float32" else dtype_of(task)
    config = loop_config(task, dtype=dtype)
    parameters = model_of(config.model, config.sft, config.seed).parameters
    size = parameters * resolve_dtype(config.model.dtype).itemsize
    records: Sequence[StepRecord] = []
    for records in iterate(steps_of(config, task)):
        for line, findings in _lines_so_far(task, records, dtype, size) if len(records) >= _TELLING else ():
            if len(records) < STEPS:
                findings.notes.append(f"after {len(records)} of {STEPS} steps")
            yield line, findings
    if task.argument != "float32":
        yield "steps", _steps(records)


def _lines_so_far(
    task: CheckTask, records: Sequence[StepRecord], dtype: str, size: int
) -> Iterator[tuple[str, Findings]]:
    name = f"mismatch-{task.argument}"
    yield name, mismatch(records, name, dtype)
    if task.argument != "float32":
        yield "turns", _turns(records)
        yield "sync", _sync(task, records, size)


def mismatch(records: Sequence[StepRecord], name: str, dtype: str) -> Findings:
    """Hold |trainer - engine| log-probs to the bound of the sync probe, at every version."""
    findings, why = Findings(), f"the sync probe's bound in {dtype}; the weights move far in a step"
    for step, record in enumerate(records):
        for key, what in ((_PROBE, "fresh samples"), (_UPDATE, "samples of the step")):
            value = record.metrics.get(key, math.nan)
            findings.figures[f"{name}/{'probe' if key == _PROBE else 'update'}_{step}"] = value
            findings.at_most(f"version {step}, {what}: nats a token", value, BOUNDS[dtype], why)
    return findings


def _steps(records: Sequence[StepRecord]) -> Findings:
    findings = Findings()
    findings.equal("steps", len(records), STEPS, "asked")
    for step, record in enumerate(records):
        findings.figures[f"steps/step_{step}_s"] = record.seconds
        findings.notes.append(f"step {step + 1}: {written(record.seconds, 's')}")
        norm = record.metrics.get("policy/grad_norm", math.nan)
        findings.at_least(f"step {step + 1}: norm of the gradient", norm, 1e-12, "rewards differ in groups")
    for key in (SKIPPED, BAD_WEIGHTS):
        findings.equal(key, sum(r.metrics.get(key, math.nan) for r in records), 0, "every update is applied")
    return findings


def _turns(records: Sequence[StepRecord]) -> Findings:
    """Report the seconds of each part in the last step: the first ones allocate and compile. A step has two
    offloads, before and after the push; their seconds are summed.
    """
    findings, last = Findings(), records[-1].metrics
    parts = {key: value for key, value in last.items() if key.startswith(_TURN)}
    findings.figures |= {f"turns/{key.removeprefix(_TURN)}": value for key, value in parts.items()}
    findings.figures["turns/all_s"] = sum(parts.values())
    findings.figures["turns/policy_offload_first_s"] = records[0].metrics.get(_OFFLOAD, math.nan)
    busy = {key: value for key, value in last.items() if key.startswith(_OFFLOAD_PART)}
    inside = {f"time/{key.removeprefix('time/policy_').removesuffix(_BUSY)}_s": v for key, v in busy.items()}
    findings.figures |= offload_parts("turns", inside, last.get(_OFFLOAD, math.nan))
    findings.notes += [f"{key.removeprefix(_TURN)[:-2]}: {written(v, 's')}" for key, v in parts.items()]
    names = ("engines_sleep", "engines_wake", "policy_reload", "policy_offload")
    timed = [name for name in names if f"{_TURN}{name}_s" in parts]
    findings.equal("parts of a turn that took place", len(timed), len(names), ", ".join(names))
    return findings


def _sync(task: CheckTask, records: Sequence[StepRecord], expected: int) -> Findings:
    findings, last = Findings(), records[-1].metrics
    sent = last.get("sync/bytes", math.nan)
    seconds = sum(last.get(f"time/sync_{part}_s", math.nan) for part in _SYNC)
    findings.equal("bytes of a sync", sent, expected, "every parameter once, in the dtype of the model")
    travel = last.get("time/sync_travel_s", math.nan)
    findings.figures |= {
        "sync/bytes": sent,
        "sync/bytes_per_s": sent / seconds,
        "sync/of_copy": sent / seconds / task.device_figures["device/copy_bytes_per_s"],
        "sync/travel_bytes_per_s": sent / travel,
        "sync/travel_of_copy": sent / travel / task.device_figures["device/copy_bytes_per_s"],
        **{
            f"sync/{key.removeprefix('time/sync_')}": v
            for key, v in last.items()
            if key.startswith("time/sync_")
        },
    }
    rate, of_copy = written(sent / seconds, "B/s"), written(findings.figures["sync/of_copy"], "%")
    travel_share = written(findings.figures["sync/travel_of_copy"], "%")
    findings.notes.append(
        f"{written(sent, 'B')} at {rate}, {of_copy} of a copy; travelling alone {travel_share}"
    )
    return findings


async def steps_of(config: Config, task: CheckTask) -> AsyncIterator[list[StepRecord]]:
    """Run the steps of ``config`` on this machine's cluster; yield the records so far after each step."""
    from actors.cluster import Cluster  # needs Ray, which other lines do not

    inputs = load_inputs(config, print_line, device=device_type())
    async with Cluster(config, inputs.teacher_dirs) as cluster:
        async with deadline(config.cluster.timeouts.up_s, "start: actors up and models loaded"):
            workers = await cluster.start_training(inputs.model_dir)
        done = asyncio.Queue[bool]()  # True: a step is done, False: all are, or an error

        def after(step: int, metrics: dict[str, float]) -> None:
            print_line(step_line(step, metrics))
            done.put_nowait(True)

        recorder = BenchRecorder(config.seed, task.directory, after)
        steps = asyncio.create_task(
            driver.run(config, workers, inputs.prompts, [], recorder, NoCheckpoints()), name="steps"
        )
        steps.add_done_callback(lambda _: done.put_nowait(False))
        try:
            while await done.get():  # bounded: the loop's stages have deadlines
                yield list(recorder.steps)
            await steps  # bounded: it is done
        finally:
            steps.cancel()


def iterate(values: AsyncIterator[T]) -> Iterator[T]:
    """Yield ``values`` as they arrive, for a caller without an event loop."""

    async def following() -> T | None:
        return await anext(values, None)

    with asyncio.Runner() as runner:
        while (value := runner.run(following())) is not None:
            yield value


def short_bench(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    """Benchmark the loop with the limits of its stages; `plan` is calibrated with the result."""
    findings = Findings()
    sections: dict[str, dict[str, Any]] = {
        "bench": {"warmup_steps": 1, "steps": 2, "lengths": _lengths(task)},
        "weight_sync": {"probe_every": 0},
        "health": {"min_signal_groups": 0},
    }
    if not task.rehearsal:
        sections["batch"] = {"prompts_per_step": 32, "samples_per_prompt": 8}
        sections["sampling"] = {"max_new_tokens": 512}
    config = loop_config(task, dtype=dtype_of(task), **sections)
    directory = bench(config.model_copy(update={"name": "bench"}))
    findings.bench = json.loads((Path(directory) / "bench.json").read_text())
    if not task.rehearsal:  # `plan` knows this shape by name, on any machine
        findings.bench["config"]["model"]["path"] = SHAPE_OF
    figures = findings.bench["figures"]
    findings.figures |= {f"bench/{key}": v for key, v in figures.items() if key.startswith(_KEPT)}
    findings.notes += [f"{FIGURES[key].label}: {show(figures, key)}" for key in _SHOWN if key in figures]
    shares = sum(value for key, value in figures.items() if key.startswith("share/"))
    findings.at_most("shares of a step's time, off from 1", abs(shares - 1), 1e-6, "every moment counts once")
    steps = len(findings.bench["decode_steps"])
    findings.at_least("single steps of an engine", steps, 1, "`plan` takes the speed of decoding from them")
    if not task.rehearsal:
        for stage in ("generation", "training"):
            share = figures.get(f"of_limit/{stage}", math.nan)
            findings.at_least(f"{stage}, share of its limit", share, 0.5, _STAGE)
    yield "bench", findings


def _lengths(task: CheckTask) -> dict[str, object]:
    return {"kind": "lognormal", "mean": 8 if task.rehearsal else 200, "sigma": 0.7}
