"""`grpo-dist report`: write the page, or serve it while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_dist.errors import UserError
from grpo_dist.runtime.files import open_new, publish
from grpo_dist.tools.report.answers import AnswerReader
from grpo_dist.tools.report.page import whole_page
from grpo_dist.tools.report.run_dir import RunDir, open_runs
from grpo_dist.tools.report.source import ReportLimits, sources


def write_report(
    paths: Sequence[str], output: str | None, limits: ReportLimits, say: Callable[[str], None]
) -> Path:
    """Raises UserError for what is no run directory, and where the file cannot be written."""
    runs = open_runs(paths)
    target = Path(output).expanduser() if output else _default(runs)
    if target.is_dir():
        raise UserError(
            f"--output {target}: a directory; expected the name of a file, e.g. {target / 'report.html'}"
        )
    partial = target.with_name(f".{target.name}.partial")
    try:
        with AnswerReader() as answers, open_new(partial) as file:
            for text in whole_page(sources(runs, limits, answers), limits):
                file.write(text)
        publish(partial, target)
    except OSError as error:
        if error.filename not in (None, str(partial), str(target)):  # a file of a run cannot be read
            raise UserError(
                f"{error.filename}: {error.strerror}; make it readable, or leave out the run"
            ) from error
        raise UserError(
            f"--output {target}: cannot be written ({error.strerror}); name another file"
        ) from error
    finally:
        partial.unlink(missing_ok=True)  # is gone where it was published
    say(f"{target}: {target.stat().st_size / 1e6:.1f} MB, {len(runs)} run(s); open it in a browser")
    return target


def _default(runs: list[RunDir]) -> Path:
    return runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
