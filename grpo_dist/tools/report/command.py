"""`grpo-dist report`: write the page of one or several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_dist.errors import UserError, expanded
from grpo_dist.runtime.files import check_replaceable, open_new, publish
from grpo_dist.tools.report.answers import AnswerReader
from grpo_dist.tools.report.page import whole_page
from grpo_dist.tools.report.run_dir import RunDir, open_runs
from grpo_dist.tools.report.source import ReportLimits, sources


def write_report(
    paths: Sequence[str], output: str | None, limits: ReportLimits, say: Callable[[str], None]
) -> Path:
    """Write the page. Raises UserError for a path that is not a run directory, or an unwritable file."""
    runs = open_runs(paths)
    target = expanded(output) if output else _default(runs)
    if target.is_dir():
        raise UserError(
            f"--output {target} is a directory; expected a file name, e.g. {target / 'report.html'}"
        )
    check_replaceable(target)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with AnswerReader() as answers, open_new(partial) as file:
            for text in whole_page(sources(runs, limits, answers), limits):
                file.write(text)
        publish(partial, target)
    except OSError as error:
        if error.filename not in (None, str(partial), str(target)):  # an unreadable file of a run
            raise UserError(
                f"{error.filename}: {error.strerror}; make it readable, or leave out the run"
            ) from error
        raise UserError(
            f"--output {target} cannot be written ({error.strerror}); name another file"
        ) from error
    finally:
        partial.unlink(missing_ok=True)  # already gone after publishing
    say(f"{target}: {target.stat().st_size / 1e6:.1f} MB, {len(runs)} run(s); open it in a browser")
    return target


def _default(runs: list[RunDir]) -> Path:
    return runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
