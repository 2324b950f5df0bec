"""Names and units of figures, whether higher is better, and tables of one or two results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_dist.runtime.tables import make_table
from grpo_dist.tools.bench.result import ActorMemory, BenchResult


@dataclass(frozen=True, slots=True)
class Figure:
    """``unit``: unit in tables. ``better``: 1 if higher is better, -1 if lower is, 0 for neither."""

    label: str
    unit: str
    better: int


FIGURES: dict[str, Figure] = {
    "loop/tokens_per_s": Figure("loop, prompt and completion tokens", "tok/s", 1),
    "loop/completion_tokens_per_s": Figure("loop, completion tokens", "tok/s", 1),
    "loop/samples_per_s": Figure("loop, samples", "/s", 1),
    "loop/step_s": Figure("step, mean", "s", -1),
    "loop/step_median_s": Figure("step, median", "s", -1),
    "generation/tokens_per_s": Figure("generation", "tok/s", 1),
    "generation/step_s": Figure("generation in a step", "s", -1),
    "generation/acceptance_length": Figure("mean acceptance length", "tok", 1),
    "episodes/turns": Figure("turns of a sample", "turns", 0),
    "episodes/tool_wait_s": Figure("environment wait per turn", "s", -1),
    "episodes/cached_share": Figure("prompt of later turns, from the cache", "%", 1),
    "tail/staleness": Figure("staleness, mean", "steps", 0),
    "tail/waited_steps": Figure("groups carried over, steps", "steps", 0),
    "tail/length_bias": Figure("length bias", "%", 0),
    "training/tokens_per_s": Figure("training", "tok/s", 1),
    "training/step_s": Figure("training in a step", "s", -1),
    "training/mfu": Figure("model FLOPs utilisation of the trainer", "%", 1),
    "training/peak_flops": Figure("peak that MFU refers to", "FLOP/s", 0),
    "training/needed_share": Figure("tokens an update needs, of those it computes", "%", 1),
    "scoring/samples_per_s": Figure("scoring, samples", "/s", 1),
    "scoring/step_s": Figure("scoring in a step", "s", -1),
    "sync/bytes_per_s": Figure("weight sync", "B/s", 1),
    "sync/step_s": Figure("weight sync in a step", "s", -1),
    "sync/bytes": Figure("weight sync, bytes", "B", 0),
    "sync/changed_share": Figure("changed words of the weights", "%", 0),
    "share/generation": Figure("time: generation", "%", 0),
    "share/training": Figure("time: training, not overlapped", "%", 0),
    "share/sync": Figure("time: weight sync, not overlapped", "%", 0),
    "share/scoring": Figure("time: scoring, not overlapped", "%", 0),
    "share/reference": Figure("time: reference, not overlapped", "%", 0),
    "share/turns": Figure("time: role switches on shared GPUs, not overlapped", "%", -1),
    "share/overhead": Figure("time: driver and Ray", "%", -1),
    "overhead/step_s": Figure("driver and Ray in a step", "s", -1),
    "overhead/driver_cpu_s": Figure("CPU time of the driver in a step", "s", -1),
    "idle/rollout": Figure("rollout idle", "%", -1),
    "idle/trainer": Figure("trainer idle", "%", -1),
    "limit/generation_tokens_per_s": Figure("limit of generation", "tok/s", 0),
    "limit/training_tokens_per_s": Figure("limit of training", "tok/s", 0),
    "limit/sync_bytes_per_s": Figure("limit of the weight sync", "B/s", 0),
    "limit/generation_step_s": Figure("generation of a step at its limit", "s", 0),
    "limit/training_step_s": Figure("training of a step at its limit", "s", 0),
    "limit/sync_step_s": Figure("weight sync of a step at its limit", "s", 0),
    "limit/step_s": Figure("step at its limit", "s", 0),
    "of_limit/generation": Figure("generation, of its limit", "%", 1),
    "of_limit/training": Figure("training, of its limit", "%", 1),
    "of_limit/sync": Figure("weight sync, of its limit", "%", 1),
    "of_limit/loop": Figure("loop, of its limit", "%", 1),
    "loop/step_over_limit": Figure("step over its limit", "x", -1),
}
_NOTABLE = 0.02  # changes above this share are coloured
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def written(value: float, unit: str) -> str:
    """``0.934, "%"`` -> ``93.4 %``; ``52136448, "B"`` -> ``52.1 MB``; ``2834.2, "/s"`` -> ``2,834 /s``."""
    if unit == "%":
        return f"{value:.1%}".replace("%", " %")
    if unit in ("B", "B/s", "FLOP/s"):
        factor, prefix = next(((f, p) for f, p in _PREFIXES if abs(value) >= f), (1.0, ""))
        return f"{value / factor:,.1f} {prefix}{unit}"
    if unit == "s" and abs(value) < 0.1:
        return f"{value * 1e3:.1f} ms"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f} {unit}"


def print_result(result: BenchResult) -> None:
    """Print every figure of the result, the peak memory of each actor, and how the limits were measured."""
    console = Console(highlight=False)
    values = [(FIGURES[key].label, show(result.figures, key)) for key in FIGURES if key in result.figures]
    peaks = [(f"peak memory of {actor.name}", _peaks(actor)) for actor in result.actors]
    console.print(make_table(result.name, ("figure", ""), [*values, *peaks], bold=True))
    for limit, how in result.limit_settings.items():
        console.print(f"limit, {limit}: {how}", soft_wrap=True)


def _peaks(actor: ActorMemory) -> str:
    gpu = f", {written(actor.peak_gpu_bytes, 'B')} of GPUs" if actor.peak_gpu_bytes else ""
    return f"{written(actor.peak_bytes, 'B')}{gpu}"


def show(figures: dict[str, float], key: str) -> str:
    """Return the figure ``key`` as text; a dash if it was not measured."""
    value = figures.get(key)
    return "–" if value is None or math.isnan(value) else written(value, FIGURES[key].unit)


# Two results side by side


def compare(a: Path, b: Path, console: Console | None = None) -> None:
    """Print all figures of two results, and the ratio B / A. Raises UserError for an invalid file."""
    first, second = BenchResult.read(a), BenchResult.read(b)
    console = console or Console(highlight=False)
    console.print(ratio_table(first, second))
    for line in differences(first, second):
        console.print(f"note: {line}", soft_wrap=True)


def ratios(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    """Return b / a for every shared figure with ``a`` other than 0."""
    return {key: b[key] / value for key, value in a.items() if value and key in b}


def differences(a: BenchResult, b: BenchResult) -> list[str]:
    """Return differences of workload and machine, which also affect the ratios."""
    differences = []
    for what, x, y in (("workload", a.workload, b.workload), ("machine", a.machine, b.machine)):
        changed = [key for key in {**x, **y} if x.get(key) != y.get(key)]
        differences += [f"{what}: {key} is {x.get(key)} in A and {y.get(key)} in B" for key in changed]
    return differences


def ratio_table(a: BenchResult, b: BenchResult) -> Table:
    table = make_table(f"A: {a.name}   B: {b.name}", ("figure", "A", "B", "B / A"), bold=True)
    changes = ratios(a.figures, b.figures)
    for key, figure in FIGURES.items():
        if key in a.figures or key in b.figures:
            ratio = f"{_colour(changes[key], figure.better)}{changes[key]:.3f}" if key in changes else "–"
            table.add_row(figure.label, show(a.figures, key), show(b.figures, key), ratio)
    peaks = {actor.name: actor.peak_bytes for actor in b.actors}
    for actor in a.actors:
        if actor.name in peaks:
            change = peaks[actor.name] / max(actor.peak_bytes, 1)
            ours, other = written(actor.peak_bytes, "B"), written(peaks[actor.name], "B")
            table.add_row(f"peak memory of {actor.name}", ours, other, f"{_colour(change, -1)}{change:.3f}")
    return table


def _colour(ratio: float, better: int) -> str:
    if not better or abs(ratio - 1) <= _NOTABLE:
        return ""
    return "[green]" if (ratio > 1) == (better > 0) else "[red]"
