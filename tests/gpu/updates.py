"""Updates: at one ZeRO stage packed against padded, memory against plan, states off the GPU and back; on two
sequence-parallel ranks; and against a bare loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_dist.loop.sync_probe import BOUNDS
from grpo_dist.runtime.hardware import available_cpus, resolve_dtype
from grpo_dist.tools.bench.limit_jobs import measure_training
from grpo_dist.tools.bench.limits import run_jobs
from grpo_dist.tools.bench.table import written
from grpo_dist.tools.plan.models import model_of
from tests.gpu.findings import Findings
from tests.gpu.process import CheckTask
from tests.gpu.sizes import dtype_of, gradient_bound, model_shape, planned, update_config, update_size
from tests.gpu.trainer_job import model_dir_of, run_trainers, trainer_sections

_PINNED = "through memory that is not pinned a copy reaches a fifth or so of the measured rate"

_REPEATS = 3
_OTHER = (
    "it has the bare loop's products, and a copy of the gradients: at half its speed it takes another path"
)


def zero(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    stage, findings = int(task.argument), Findings()
    dtype = dtype_of(task) if stage else "float32"
    size = update_size(task, dtype=dtype, zero_stage=stage)
    config = update_config(task, size, dtype=dtype, zero_stage=stage)
    name, sections = f"zero{stage}", trainer_sections(config)
    (packed,) = run_trainers(sections, size, timed=True)
    unpacked = config.model.model_copy(update={"packing": False})
    (padded,) = run_trainers(replace(sections, model=unpacked), size)
    compare(task, findings, packed, padded, dtype=dtype, what="packed and padded")
    findings.figures |= {
        f"{name}/update_s": packed["update_s"],
        f"{name}/tokens": float(size.rows * size.row),
        f"{name}/rows": float(size.rows),
        f"{name}/row_tokens": float(size.row),
    }
    if not task.rehearsal:
        findings.notes.append(written(size.rows * size.row / packed["update_s"], "tokens/s"))
        expected = planned(task, config, size)
        _memory(findings, name, packed["peak_bytes"], expected.total - expected.parts["runtime"])
    _states(task, findings, name, packed)
    yield name, findings


def compare(
    task: CheckTask,
    findings: Findings,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    *,
    dtype: str,
    what: str,
) -> None:
    """Claim that the gradients and log-probs of two trainers agree up to rounding."""
    shape = model_shape(task)
    bound, why = gradient_bound(
        dtype, layers=shape["num_hidden_layers"], widest=max(shape["intermediate_size"], shape["hidden_size"])
    )
    a, b = (np.concatenate([v.ravel() for _, v in sorted(t["gradients"].items())]) for t in (ours, theirs))
    apart = float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))
    findings.at_most(f"gradients, {what}: relative difference", apart, bound, why)
    avg = float(ours["logprobs"].mean())
    findings.at_most(f"log-probs, {what}: mean", avg, -1.0, "random tokens under random weights are unlikely")
    nats = float(np.abs(ours["logprobs"] - theirs["logprobs"]).mean())
    findings.at_most(f"log-probs, {what}: mean difference", nats, BOUNDS[dtype], "the sync probe's bound")


def _memory(findings: Findings, name: str, peak: int, expected: int) -> None:
    findings.figures |= {f"{name}/peak_bytes": float(peak), f"{name}/planned_bytes": float(expected)}
    findings.notes.append(f"peak {written(peak, 'B')}, planned {written(expected, 'B')}")
    findings.at_most("peak memory, off from plan", abs(peak / expected - 1), 0.05, "what plan promises")


def _states(task: CheckTask, findings: Findings, name: str, result: dict[str, Any]) -> None:
    why = f"checksums of {result['tensors']} tensors: weights, master weights, moments"
    findings.true("states after a turn, the same bits", result["same"], why)
    findings.true(
        "an update after the turn", math.isfinite(result["after"]), "the norm of its gradient is finite"
    )
    if task.rehearsal:
        return
    moved, off, on = result["moved_bytes"], result["offload_s"][-1], result["reload_s"][-1]
    findings.figures |= {
        f"{name}/offload_first_s": result["offload_s"][0], f"{name}/offload_s": off, f"{name}/reload_s": on,
        f"{name}/moved_bytes": float(moved), f"{name}/freed_bytes": float(result["freed_bytes"]),
        **offload_parts(name, result["offload_parts"], off),
    }  # fmt: skip
    findings.notes.append(f"{written(moved, 'B')} off in {written(off, 's')}, on in {written(on, 's')}")
    copies = result["offload_parts"]["time/offload_copies_s"]  # without freeing torch's cache
    for way, seconds, rate in (
        ("off", copies, task.device_figures["device/to_host_bytes_per_s"]),
        ("on", on, task.device_figures["device/from_host_bytes_per_s"]),
    ):
        findings.at_least(f"states {way}, share of a pinned copy", moved / seconds / rate, 0.25, _PINNED)


def offload_parts(name: str, parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Return figures of the parts of an offload of ``total`` seconds, and of the rest.

    {"time/offload_copies_s": 0.2}, 0.3 -> {"NAME/offload_copies_s": 0.2, "NAME/offload_rest_s": 0.1}
    """
    figures = {f"{name}/{key.removeprefix('time/')}": seconds for key, seconds in parts.items()}
    return figures | {f"{name}/offload_rest_s": total - sum(parts.values())}


def sequence_parallel(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    findings, dtype = Findings(), dtype_of(task)
    size = update_size(task, dtype=dtype, zero_stage=2)
    alone = update_config(task, size, dtype=dtype, zero_stage=2)
    shared = update_config(task, size, dtype=dtype, zero_stage=2, num_workers=2, sequence_parallel=2)
    (one,) = run_trainers(trainer_sections(alone), size, timed=True)
    two = run_trainers(trainer_sections(shared), size, timed=True)
    compare(task, findings, two[0], one, dtype=dtype, what="two ranks and one")
    findings.true("norms of both ranks, the same", two[0]["norm"] == two[1]["norm"], "one gradient")
    findings.figures |= {
        "sequence-parallel/update_s": two[0]["update_s"],
        "sequence-parallel/of_one_rank": one["update_s"] / two[0]["update_s"],
        "sequence-parallel/peak_bytes": float(two[0]["peak_bytes"]),
    }
    faster = written(one["update_s"] / two[0]["update_s"], "x")
    findings.notes.append(f"{faster} as fast as one rank")
    yield "sequence-parallel", findings


def speed(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    """Compare the trainer's tokens per second with a bare loop's, each in its own process. The bare loop's
    rows share nothing; they have the trainer's tokens and attention, with a prompt once for its group.
    """
    findings, dtype = Findings(), dtype_of(task)
    size = update_size(task, dtype=dtype, zero_stage=1)
    config = update_config(task, size, dtype=dtype, zero_stage=1)
    (result,) = run_trainers(trainer_sections(config), size, timed=True)
    needed = size.work
    row = needed.row_tokens(size.row)
    rows = round(needed.tokens / row)
    job = {
        "model_dir": model_dir_of(config.model, config.seed), "dtype": resolve_dtype(config.model.dtype),
        "rows": rows, "row_tokens": row, "trained_share": needed.trained / needed.tokens, "repeats": _REPEATS,
    }  # fmt: skip
    (bare,) = run_jobs(measure_training, [job], threads=available_cpus(), gpus=1)
    tokens, update_s = size.rows * size.row, result["update_s"]
    limit_s = min(bare["seconds"]) * needed.tokens / (rows * row)
    model = model_of(config.model, config.sft, config.seed)
    work = needed.flops(model.shape)
    findings.figures |= {
        "speed/tokens_per_s": tokens / update_s,
        "speed/limit_tokens_per_s": tokens / limit_s,
        "speed/of_limit": limit_s / update_s,
        "speed/of_matrix_rate": work / update_s / bare["matmul"],
        "speed/limit_of_matrix_rate": work / limit_s / bare["matmul"],
    }
    of_limit, of_matrices = (
        written(findings.figures[f"speed/{name}"], "%") for name in ("of_limit", "of_matrix_rate")
    )
    rate = written(tokens / update_s, "tokens/s")
    findings.notes.append(f"{rate}, {of_limit} of a bare loop, {of_matrices} of the matrix rate")
    if task.rehearsal:
        findings.at_least("tokens per second", tokens / update_s, 1.0, "it trains")
    else:
        findings.at_least("speed, share of a bare loop", limit_s / update_s, 0.5, _OTHER)
    yield "speed", findings
