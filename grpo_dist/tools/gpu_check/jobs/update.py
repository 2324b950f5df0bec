"""An update at one ZeRO stage: packed against padded, its memory against plan, and states off and on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_dist.loop.sync_probe import BOUNDS
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.gpu_check.dtypes import gradient_bound
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.sizes import (
    dtype_of,
    model_shape,
    planned,
    update_config,
    update_size,
)
from grpo_dist.tools.gpu_check.trainers import run_trainers, trainer_sections

_PINNED = "through memory that is not pinned a copy reaches a fifth or so of the measured rate"


def measure(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    stage, found = int(task.argument), Findings()
    dtype = dtype_of(task) if stage else "float32"
    size = update_size(task, dtype=dtype, zero_stage=stage)
    config = update_config(task, size, dtype=dtype, zero_stage=stage)
    name, sections = f"zero{stage}", trainer_sections(config)
    (packed,) = run_trainers(sections, size, timed=True)
    unpacked = config.model.model_copy(update={"packing": False})
    (padded,) = run_trainers(replace(sections, model=unpacked), size)
    compare(task, found, packed, padded, dtype=dtype, what="packed and padded")
    found.figures |= {
        f"{name}/update_s": packed["update_s"],
        f"{name}/tokens": float(size.rows * size.row),
        f"{name}/rows": float(size.rows),
        f"{name}/row_tokens": float(size.row),
    }
    if not task.rehearsal:
        found.notes.append(written(size.rows * size.row / packed["update_s"], "tokens/s"))
        expected = planned(task, config, size)
        _memory(found, name, packed["peak_bytes"], expected.total - expected.parts["runtime"])
    _states(task, found, name, packed)
    yield name, found


def compare(
    task: CheckTask, found: Findings, own: dict[str, Any], other: dict[str, Any], *, dtype: str, what: str
) -> None:
    """Claim that the gradients and log-probs of two trainers are the same but for rounding."""
    shape = model_shape(task)
    bound, why = gradient_bound(
        dtype, layers=shape["num_hidden_layers"], widest=max(shape["intermediate_size"], shape["hidden_size"])
    )
    a, b = (np.concatenate([v.ravel() for _, v in sorted(t["gradients"].items())]) for t in (own, other))
    apart = float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))
    found.at_most(f"gradients, {what}: relative difference", apart, bound, why)
    mean = float(own["logprobs"].mean())
    found.at_most(f"log-probs, {what}: mean", mean, -1.0, "random tokens under random weights are unlikely")
    nats = float(np.abs(own["logprobs"] - other["logprobs"]).mean())
    found.at_most(f"log-probs, {what}: mean difference", nats, BOUNDS[dtype], "the sync probe's bound")


def _memory(found: Findings, name: str, peak: int, expected: int) -> None:
    found.figures |= {f"{name}/peak_bytes": float(peak), f"{name}/planned_bytes": float(expected)}
    found.notes.append(f"peak {written(peak, 'B')}, planned {written(expected, 'B')}")
    found.at_most("peak memory, off from plan", abs(peak / expected - 1), 0.05, "what plan promises")


def _states(task: CheckTask, found: Findings, name: str, own: dict[str, Any]) -> None:
    why = f"checksums of {own['tensors']} tensors: weights, master weights, moments"
    found.true("states after a turn, the same bits", own["same"], why)
    found.true("an update after the turn", math.isfinite(own["after"]), "the norm of its gradient is finite")
    if task.rehearsal:
        return
    moved, off, on = own["moved_bytes"], own["offload_s"][-1], own["reload_s"][-1]
    found.figures |= {
        f"{name}/offload_first_s": own["offload_s"][0],
        f"{name}/offload_s": off,
        f"{name}/reload_s": on,
        f"{name}/moved_bytes": float(moved),
        f"{name}/freed_bytes": float(own["freed_bytes"]),
        **offload_parts(name, own["offload_parts"], off),
    }
    found.notes.append(f"{written(moved, 'B')} off in {written(off, 's')}, on in {written(on, 's')}")
    copies = own["offload_parts"]["time/offload_copies_s"]  # without what the update left in torch's cache
    for direction, seconds, rate in (
        ("off", copies, task.known["device/to_host_bytes_per_s"]),
        ("on", on, task.known["device/from_host_bytes_per_s"]),
    ):
        found.at_least(f"states {direction}, share of a pinned copy", moved / seconds / rate, 0.25, _PINNED)


def offload_parts(name: str, parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Return figures of the parts of an offload that took ``total`` seconds, and of what none of them has.

    {"time/offload_copies_s": 0.2}, 0.3 -> {"NAME/offload_copies_s": 0.2, "NAME/offload_rest_s": 0.1}
    """
    figures = {f"{name}/{key.removeprefix('time/')}": seconds for key, seconds in parts.items()}
    return figures | {f"{name}/offload_rest_s": total - sum(parts.values())}
