"""Terminal tables of an evaluation and of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.markup import escape

from grpo_dist.evaluation.estimates import Estimate
from grpo_dist.runtime.tables import make_table, print_lines, print_rows, wide_console
from grpo_dist.tools.evaluate.compare import ModelComparison
from grpo_dist.tools.evaluate.episodes import EpisodeFigures
from grpo_dist.tools.evaluate.result import EvaluationResult, Measured

EPISODE_COLUMNS = ("set", "episodes", "turns", "calls", "with a call, %", "failed calls", "ends")


def print_result(result: EvaluationResult, directory: str) -> None:
    title = f"{escape(result.identity.model)}: value [95 % interval], %"
    names = headings(list(dict.fromkeys(n for m in result.measured for n in m.estimates)))
    columns = ("problems", *names.values(), "tokens", "cut off", "unscored")
    rows = [row(measured, list(names)) for measured in result.measured]
    console = wide_console()
    print_rows(console, title, ("set", *columns), rows)
    if played := [episode_row(m, m.episodes) for m in result.measured if m.episodes is not None]:
        print_rows(console, "episodes", EPISODE_COLUMNS, played)
    print_lines(console, [f"results: {directory}"])


def headings(names: Sequence[str]) -> dict[str, str]:
    """Return the heading of each measure to show.

    Equal measures share a column: of n samples pass@1 is avg@n, and maj@n is cons@n.
    """
    shown = {name: name for name in names}
    for name in names:
        kind, _, n = name.partition("@")
        other = {"avg": "pass@1", "cons": f"maj@{n}"}.get(kind)
        if other in shown:
            del shown[other]
            shown[name] = f"{name}\n= {other}"
    return shown


def row(measured: Measured, names: Sequence[str]) -> list[str]:
    return [
        _name(measured),
        str(measured.problems),
        *(interval(measured.estimates.get(name)) for name in names),
        "–" if math.isnan(measured.length_tokens) else f"{measured.length_tokens:,.0f}",
        f"{measured.truncated:.0%}",
        str(measured.unscored or "–"),
    ]


def episode_row(measured: Measured, own: EpisodeFigures) -> list[str]:
    return [
        _name(measured),
        str(own.episodes),
        f"{own.turns:.1f}",
        f"{own.tool_calls:.2f}",
        interval(own.tool_call_share),
        f"{own.tool_error_share:.0%}" if own.tool_calls else "–",
        ", ".join(f"{end} {share:.0%}" for end, share in own.ends.items()),
    ]


def _name(measured: Measured) -> str:
    return escape(measured.set if measured.by is None else f"  {measured.by} {measured.value}")


def interval(found: Estimate | None) -> str:
    """Format an estimate in %: 0.5, 0.4 to 0.6 -> "50.0 [40.0, 60.0]"; None and NaN are "–"."""
    if found is None or math.isnan(found.value):
        return "–"
    return f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def print_comparison(comparison: ModelComparison) -> None:
    shown = headings([found.measure for found in comparison.rows])
    rows = []
    for found in comparison.rows:
        if found.measure not in shown:
            continue
        gain = found.difference
        rows.append(
            (
                escape(found.set),
                shown[found.measure].replace("\n", " "),
                str(found.problems),
                f"{100 * found.first:.1f}",
                f"{100 * found.second:.1f}",
                f"{100 * gain.value:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]",
                f"{gain.p:.3g}",
                gain.test,
            )
        )
    title = f"A: {escape(comparison.first)}   B: {escape(comparison.second)}   %, B - A [95 % interval]"
    columns = ("set", "measure", "problems", "A", "B", "B - A", "p", "test")
    console = wide_console()
    console.print(make_table(title, columns, rows, left=("set", "measure", "test"), wrap="text"))
    print_lines(console, (f"warning: {warning}" for warning in comparison.warnings), style="bold yellow")
