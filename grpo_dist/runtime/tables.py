"""Print tables and lines on the terminal, in one style for all commands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

_FILE_WIDTH = 200  # columns if the output is not a terminal
_ANY_WIDTH = 10_000

Wrap = Literal["words", "text", "never"]


class Terminal(Console):
    """A console that raises BrokenPipeError if nobody reads its output; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise  # the error that rich's `_check_buffer` has caught


def wide_console() -> Console:
    """Return a console that is wide enough for long rows if the output is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def make_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    left: Collection[str] | None = None,
    wrap: Wrap = "words",
    bold: bool = False,
) -> Table:
    """Build a table from headings and ``rows`` of cells, all in rich markup.

    ``left``: left-aligned columns, by default the first. ``wrap``: "words": cells wrap between words; "text":
    left-aligned cells wrap at any character, others never; "never": no cell wraps.
    """
    table = Table(title=title, title_justify="left", title_style="bold" if bold else None)
    for i, heading in enumerate(columns):
        is_left = i == 0 if left is None else heading in left
        table.add_column(
            heading,
            justify="left" if is_left else "right",
            no_wrap=wrap == "never" or (wrap == "text" and not is_left),
            overflow="fold" if wrap == "text" and is_left else "ellipsis",
        )
    for cells in rows:
        table.add_row(*cells)
    return table


def print_rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` as a table; on a narrow terminal, one cell per line, so that none is truncated."""
    table = make_table(title, columns, rows, wrap="never")
    if console.measure(table, options=console.options.update(width=_ANY_WIDTH)).maximum > console.width:
        table = make_table(title, (columns[0], "", ""), left=(columns[0], ""))
        for name, *cells in rows:
            for i, (heading, cell) in enumerate(zip(columns[1:], cells, strict=True)):
                last = i == len(cells) - 1
                table.add_row("" if i else name, heading.replace("\n", " "), cell, end_section=last)
    console.print(table)


def print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Print plain text without markup; the terminal wraps long lines."""
    for line in lines:
        console.print(line, style=style, markup=False, soft_wrap=True)
