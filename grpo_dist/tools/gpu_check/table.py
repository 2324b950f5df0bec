"""Prints the lines of a check."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from grpo_dist.runtime.tables import make_table
from grpo_dist.tools.gpu_check.findings import YES, Claim, number
from grpo_dist.tools.gpu_check.lines import CheckJob
from grpo_dist.tools.gpu_check.record import CheckRecord, LineRecord

_STATES = {
    "holds": "[green]holds",
    "fails": "[bold red]FAILS",
    "skipped": "[yellow]skipped",
    "not run": "[yellow]not run",
}
_LAST_LINES = 6  # of an error or a stack


def print_record(record: CheckRecord, console: Console | None = None) -> None:
    """Print a row for each line, and below it each claim with its bound."""
    console = console or Console(highlight=False)
    what = "rehearsal on the CPU" if record.rehearsal else str(record.machine.get("gpu", "this machine"))
    table = make_table(f"gpu-check: {what}", ("line", "", "s", "found, and its bound"), bold=True,
                       left=("line", "", "found, and its bound"))  # fmt: skip
    for line in record.lines:
        table.add_row(line.name, _STATES[line.state], _seconds(line), _details(line))
    console.print(table)


def print_lines_of_check(jobs: Sequence[CheckJob], console: Console | None = None) -> None:
    """Print what each line shows and needs, and what of it is rehearsed without a GPU."""
    console = console or Console(highlight=False)
    columns = ("line", "shows", "needs")
    table = make_table("lines of gpu-check", columns, left=columns, bold=True)
    for job in jobs:
        for line in job.lines:
            shows = f"{escape(line.about)}\n[dim]rehearsed: {escape(line.rehearsed)}[/dim]"
            table.add_row(line.name, shows, str(job.needs))
    console.print(table)


def _seconds(line: LineRecord) -> str:
    return f"{line.seconds:.0f}" if line.seconds else ""


def _details(line: LineRecord) -> str:
    first, *rest = line.reason.splitlines() or [""]
    reason = [first, *rest[-_LAST_LINES:]] if first else []  # the whole of it is in the record
    return "\n".join([*map(escape, [*reason, *line.notes]), *map(claim_text, line.claims)])


def claim_text(claim: Claim) -> str:
    """Return rich markup: what was found, its bound and where that comes from; red where it does not hold."""
    is_so = claim.bound == YES
    value = ("yes" if claim.holds else "no") if is_so else f"{number(claim.value)} {claim.bound}"
    text = f"{escape(claim.what)}: {value} [dim]({escape(claim.why)})[/dim]"
    return text if claim.holds else f"[bold red]{text}[/bold red]"
