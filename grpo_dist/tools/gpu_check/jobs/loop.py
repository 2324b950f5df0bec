"""Three steps of the real loop: what the engine and the trainer compute, their turns, and the weight sync."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from grpo_dist.health.watch import BAD_WEIGHTS, SKIPPED
from grpo_dist.loop.sync_probe import BOUNDS
from grpo_dist.runtime.hardware import resolve_dtype
from grpo_dist.tools.bench.record import StepRecord
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.jobs.update import offload_parts
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.loops import STEPS, as_they_come, loop_config, steps_of
from grpo_dist.tools.gpu_check.sizes import dtype_of
from grpo_dist.tools.plan.models import model_of

_TURN = "time/turn_"
_OFFLOAD, _OFFLOAD_PART, _BUSY = f"{_TURN}policy_offload_s", "time/policy_offload_", "_busy_s"
_SYNC = ("stop", "travel", "take")  # parts of a weight sync, without the turns before and after it
_PROBE, _UPDATE = "probe/logprob_diff_mean", "mismatch/logprob_diff_mean"
_TELLING = 2  # steps after which engines have had weights that moved


def measure(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    """Yield lines from the second step on, which is the first with weights that moved, and again after each
    later one. `steps` is known once the loop and its workers have ended.
    """
    dtype = "float32" if task.argument == "float32" else dtype_of(task)
    config = loop_config(task, dtype=dtype)
    parameters = model_of(config.model, config.sft, config.seed).parameters
    size = parameters * resolve_dtype(config.model.dtype).itemsize
    records: Sequence[StepRecord] = []
    for records in as_they_come(steps_of(config, task)):
        for line, found in _so_far(task, records, dtype, size) if len(records) >= _TELLING else ():
            if len(records) < STEPS:
                found.notes.append(f"after {len(records)} of {STEPS} steps")
            yield line, found
    if task.argument != "float32":
        yield "steps", _steps(records)


def _so_far(
    task: CheckTask, records: Sequence[StepRecord], dtype: str, size: int
) -> Iterator[tuple[str, Findings]]:
    name = f"mismatch-{task.argument}"
    yield name, mismatch(records, name, dtype)
    if task.argument != "float32":
        yield "turns", _turns(records)
        yield "sync", _sync(task, records, size)


def mismatch(records: Sequence[StepRecord], name: str, dtype: str) -> Findings:
    """Hold |trainer - engine| log-probs to the bound of the sync probe, at every version."""
    found, why = Findings(), f"the sync probe's bound in {dtype}; the weights move far in a step"
    for step, record in enumerate(records):
        for key, what in ((_PROBE, "fresh samples"), (_UPDATE, "samples of the step")):
            value = record.metrics.get(key, math.nan)
            found.figures[f"{name}/{'probe' if key == _PROBE else 'update'}_{step}"] = value
            found.at_most(f"version {step}, {what}: nats a token", value, BOUNDS[dtype], why)
    return found


def _steps(records: Sequence[StepRecord]) -> Findings:
    found = Findings()
    found.equal("steps", len(records), STEPS, "asked")
    for step, record in enumerate(records):
        found.figures[f"steps/step_{step}_s"] = record.seconds
        found.notes.append(f"step {step + 1}: {written(record.seconds, 's')}")
        norm = record.metrics.get("policy/grad_norm", math.nan)
        found.at_least(f"step {step + 1}: norm of the gradient", norm, 1e-12, "rewards differ in groups")
    for name in (SKIPPED, BAD_WEIGHTS):
        found.equal(name, sum(r.metrics.get(name, math.nan) for r in records), 0, "every update is applied")
    return found


def _turns(records: Sequence[StepRecord]) -> Findings:
    """Report the seconds of each part, of the last step: the first ones allocate and compile. Those of an
    offload are of both in a step, before the push and after it.
    """
    found, last = Findings(), records[-1].metrics
    parts = {key: value for key, value in last.items() if key.startswith(_TURN)}
    found.figures |= {f"turns/{key.removeprefix(_TURN)}": value for key, value in parts.items()}
    found.figures["turns/all_s"] = sum(parts.values())
    found.figures["turns/policy_offload_first_s"] = records[0].metrics.get(_OFFLOAD, math.nan)
    busy = {key: value for key, value in last.items() if key.startswith(_OFFLOAD_PART)}
    inside = {f"time/{key.removeprefix('time/policy_').removesuffix(_BUSY)}_s": v for key, v in busy.items()}
    found.figures |= offload_parts("turns", inside, last.get(_OFFLOAD, math.nan))
    found.notes += [f"{key.removeprefix(_TURN)[:-2]}: {written(value, 's')}" for key, value in parts.items()]
    names = ("engines_sleep", "engines_wake", "policy_reload", "policy_offload")
    timed = [name for name in names if f"{_TURN}{name}_s" in parts]
    found.equal("parts of a turn that took place", len(timed), len(names), ", ".join(names))
    return found


def _sync(task: CheckTask, records: Sequence[StepRecord], expected: int) -> Findings:
    found, last = Findings(), records[-1].metrics
    sent = last.get("sync/bytes", math.nan)
    seconds = sum(last.get(f"time/sync_{part}_s", math.nan) for part in _SYNC)
    found.equal("bytes of a sync", sent, expected, "every parameter once, in the dtype of the model")
    travel = last.get("time/sync_travel_s", math.nan)
    found.figures |= {
        "sync/bytes": sent,
        "sync/bytes_per_s": sent / seconds,
        "sync/of_copy": sent / seconds / task.known["device/copy_bytes_per_s"],
        "sync/travel_bytes_per_s": sent / travel,
        "sync/travel_of_copy": sent / travel / task.known["device/copy_bytes_per_s"],
        **{
            f"sync/{key.removeprefix('time/sync_')}": v
            for key, v in last.items()
            if key.startswith("time/sync_")
        },
    }
    rate, of_copy = written(sent / seconds, "B/s"), written(found.figures["sync/of_copy"], "%")
    travel_share = written(found.figures["sync/travel_of_copy"], "%")
    found.notes.append(
        f"{written(sent, 'B')} at {rate}, {of_copy} of a copy; travelling alone {travel_share}"
    )
    return found
