"""`grpo-dist report`: options, and writing the page of one or several runs. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.errors import UserError, expanded
from grpo_dist.runtime.files import check_replaceable, open_new, publish
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.tools.arguments import add_command

if TYPE_CHECKING:
    from grpo_dist.tools.report.source import ReportLimits

_TOKENS = 400_000


def add_report(commands: Any) -> None:
    text = (
        "write one or several runs as one HTML file that needs only a browser: curves, a timeline of the "
        "actors, settings, events, and every rollout token by token"
    )
    sub = add_command(commands, "report", text, _report, overrides=[], takes="runs")
    text = "run directory, e.g. runs/demo, or the directory of an evaluation"
    sub.add_argument("config", nargs="+", metavar="RUN", help=text)
    sub.add_argument(
        "--output", metavar="FILE", help="default report.html: in the run directory, or here for several runs"
    )
    sub.add_argument(
        "--serve", action="store_true", help="serve the page over HTTP instead, and follow the runs"
    )
    sub.add_argument("--port", type=int, default=8686, help="for --serve (default 8686; 0: any free port)")
    sub.add_argument(
        "--host",
        default="127.0.0.1",
        help="for --serve: anyone who can connect can read the runs (default 127.0.0.1)",
    )
    sub.add_argument(
        "--rollouts", type=int, metavar="N",
        help="how many of the newest rollouts of each run to show (default 100000, in a file at most 20 MB)",
    )  # fmt: skip
    sub.add_argument(
        "--token-values", type=int, default=_TOKENS, metavar="N",
        help=f"how many tokens in the file carry log-prob, ratio, advantage and KL, over all runs "
        f"(default {_TOKENS}; --serve has all)",
    )  # fmt: skip


def _report(
    runs: list[str], overrides: list[str], *, serve: bool, output: str | None, **options: Any
) -> None:
    if overrides:
        raise UserError(f"{overrides[0]}: a report takes run directories, no settings")
    if serve and output:
        raise UserError(f"--output {output}: --serve writes no file; leave out one of the two")
    for name in ("rollouts", "token_values"):
        if (options[name] or 0) < 0:
            raise UserError(f"--{name.replace('_', '-')} {options[name]}: expected 0 or more")
    # These load pyarrow, which --help does not need.
    from grpo_dist.tools.report.source import ReportLimits

    limits = ReportLimits(options["rollouts"], options["token_values"])
    if serve:
        # Imports pyarrow, which --help does not need.
        from grpo_dist.tools.report.server import serve as serve_runs

        serve_runs(runs, options["host"], options["port"], limits, print_line)
    else:
        write_report(runs, output, limits, print_line)


def write_report(
    paths: Sequence[str], output: str | None, limits: ReportLimits, say: Callable[[str], None]
) -> Path:
    """Write the page. Raises UserError for a path that is not a run directory, or an unwritable file."""
    # These load pyarrow, which --help does not need.
    from grpo_dist.tools.report.page import whole_page
    from grpo_dist.tools.report.rollouts import AnswerReader
    from grpo_dist.tools.report.run_dir import open_runs
    from grpo_dist.tools.report.source import sources

    runs = open_runs(paths)
    default = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    target = expanded(output) if output else default
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
