"""Two results side by side: `grpo-dist bench --compare A.json B.json`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_dist.runtime.tables import make_table
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.bench.table import FIGURES, show, written

_NOTABLE = 0.02  # a figure that changed by more than this share is coloured


def compare(a: Path, b: Path, console: Console | None = None) -> None:
    """Print every figure of both and the ratio B / A. Raises UserError for a file that is not a result."""
    first, second = BenchResult.read(a), BenchResult.read(b)
    console = console or Console(highlight=False)
    console.print(ratio_table(first, second))
    for line in differences(first, second):
        console.print(f"note: {line}", soft_wrap=True)


def ratios(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    """Return b / a of every figure that both have, except where ``a`` is 0."""
    return {key: b[key] / value for key, value in a.items() if value and key in b}


def differences(a: BenchResult, b: BenchResult) -> list[str]:
    """Return differences of work and machine, which change the ratios as well as the code does."""
    found = []
    for what, x, y in (("workload", a.workload, b.workload), ("machine", a.machine, b.machine)):
        changed = [key for key in {**x, **y} if x.get(key) != y.get(key)]
        found += [f"{what}: {key} is {x.get(key)} in A and {y.get(key)} in B" for key in changed]
    return found


def ratio_table(a: BenchResult, b: BenchResult) -> Table:
    table = make_table(f"A: {a.name}   B: {b.name}", ("figure", "A", "B", "B / A"), bold=True)
    found = ratios(a.figures, b.figures)
    for key, figure in FIGURES.items():
        if key in a.figures or key in b.figures:
            ratio = f"{_colour(found[key], figure.better)}{found[key]:.3f}" if key in found else "–"
            table.add_row(figure.label, show(a.figures, key), show(b.figures, key), ratio)
    peaks = {actor.name: actor.peak_bytes for actor in b.actors}
    for actor in a.actors:
        if actor.name in peaks:
            change = peaks[actor.name] / max(actor.peak_bytes, 1)
            own, other = written(actor.peak_bytes, "B"), written(peaks[actor.name], "B")
            table.add_row(f"peak memory of {actor.name}", own, other, f"{_colour(change, -1)}{change:.3f}")
    return table


def _colour(ratio: float, better: int) -> str:
    if not better or abs(ratio - 1) <= _NOTABLE:
        return ""
    return "[green]" if (ratio > 1) == (better > 0) else "[red]"
