"""Results of an evaluation, and of a comparison, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_dist.evaluation.estimates import Estimate
from grpo_dist.tools.evaluate.compare import ModelComparison
from grpo_dist.tools.evaluate.result import EvaluationResult, Measured

_WIDE = 200  # columns of a file, which has no edge
_ANY_WIDTH = 10_000


def print_result(result: EvaluationResult, directory: str) -> None:
    title = f"{escape(result.identity.model)}: value [95 % interval], %"
    names = headings(list(dict.fromkeys(n for m in result.measured for n in m.estimates)))
    columns = ("problems", *names.values(), "tokens", "cut off", "unscored")
    rows = [row(measured, list(names)) for measured in result.measured]
    console = console_for_tables()
    print_rows(console, title, ("set", *columns), rows)
    console.print(f"results: {directory}", soft_wrap=True, markup=False)


def headings(names: Sequence[str]) -> dict[str, str]:
    """Of each measure that is shown. What has two names is shown once: of n samples pass@1 is avg@n, and
    maj@n is cons@n.
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
        escape(measured.set if measured.by is None else f"  {measured.by} {measured.value}"),
        str(measured.problems),
        *(interval(measured.estimates.get(name)) for name in names),
        f"{measured.length_tokens:,.0f}",
        f"{measured.truncated:.0%}",
        str(measured.unscored or "–"),
    ]


def interval(found: Estimate | None) -> str:
    """0.5, 0.4 to 0.6 -> "50.0 [40.0, 60.0]"; what could not be estimated is "–"."""
    if found is None or math.isnan(found.value):
        return "–"
    return f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def print_comparison(comparison: ModelComparison) -> None:
    table = Table(
        title=f"A: {escape(comparison.first)}   B: {escape(comparison.second)}   %, B - A [95 % interval]",
        title_justify="left",
    )
    for heading in ("set", "measure"):
        table.add_column(heading, overflow="fold")
    for heading in ("problems", "A", "B", "B - A", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("test", overflow="fold")
    shown = headings([found.measure for found in comparison.rows])
    for found in comparison.rows:
        if found.measure not in shown:
            continue
        gain = found.difference
        table.add_row(
            escape(found.set),
            shown[found.measure].replace("\n", " "),
            str(found.problems),
            f"{100 * found.first:.1f}",
            f"{100 * found.second:.1f}",
            f"{100 * gain.value:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]",
            f"{gain.p:.3g}",
            gain.test,
        )
    console = console_for_tables()
    console.print(table)
    for warning in comparison.warnings:
        console.print(f"warning: {warning}", style="bold yellow", markup=False, soft_wrap=True)


def print_rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of ``rows``; where the terminal is too narrow for it, a line for each cell: none is cut off."""
    first, *others = columns
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    if console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum > console.width:
        table = Table(first, "", "", title=title, title_justify="left")
        for name, *own in rows:
            for i, (heading, cell) in enumerate(zip(others, own, strict=True)):
                last = i == len(others) - 1
                table.add_row("" if i else name, heading.replace("\n", " "), cell, end_section=last)
    console.print(table)


def console_for_tables() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console
