"""A short benchmark, with the limits of its stages; `plan` is calibrated with its result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_dist.tools.bench.run import bench
from grpo_dist.tools.bench.table import FIGURES, show
from grpo_dist.tools.gpu_check.findings import Findings
from grpo_dist.tools.gpu_check.lines import CheckTask
from grpo_dist.tools.gpu_check.loops import loop_config
from grpo_dist.tools.gpu_check.sizes import SHAPE_OF, dtype_of

_KEPT = ("loop/", "generation/", "training/", "sync/", "of_limit/", "share/", "limit/")
_SHOWN = (
    "loop/tokens_per_s",
    "of_limit/generation",
    "of_limit/training",
    "of_limit/sync",
    "loop/step_over_limit",
)
_STAGE = "the same work without the loop; at half of its speed the loop takes another path"


def measure(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    found = Findings()
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
    found.bench = json.loads((Path(directory) / "bench.json").read_text())
    if not task.rehearsal:  # `plan` knows that shape by name, wherever it reads the record
        found.bench["config"]["model"]["path"] = SHAPE_OF
    figures = found.bench["figures"]
    found.figures |= {f"bench/{key}": v for key, v in figures.items() if key.startswith(_KEPT)}
    found.notes += [f"{FIGURES[key].label}: {show(figures, key)}" for key in _SHOWN if key in figures]
    shares = sum(value for key, value in figures.items() if key.startswith("share/"))
    found.at_most("shares of a step's time, off from 1", abs(shares - 1), 1e-6, "every moment counts once")
    steps = len(found.bench["decode_steps"])
    found.at_least("single steps of an engine", steps, 1, "`plan` takes the speed of decoding from them")
    if not task.rehearsal:
        for stage in ("generation", "training"):
            share = figures.get(f"of_limit/{stage}", math.nan)
            found.at_least(f"{stage}, share of its limit", share, 0.5, _STAGE)
    yield "bench", found


def _lengths(task: CheckTask) -> dict[str, object]:
    return {"kind": "lognormal", "mean": 8 if task.rehearsal else 200, "sigma": 0.7}
