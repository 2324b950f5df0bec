"""The command line of `grpo-dist report`. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.tools.arguments import add_command

_TOKENS = 400_000
_STEPS = 1_000_000  # the last step that can be chosen, and the most steps


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
    sub.add_argument(
        "--token-steps", default="", metavar="STEPS",
        help="which steps these tokens come from, e.g. 1,10,50-60; default the newest",
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

    limits = ReportLimits(options["rollouts"], options["token_values"], steps_of(options["token_steps"]))
    if serve:
        # Imports pyarrow, which --help does not need.
        from grpo_dist.tools.report.server import serve as serve_runs

        serve_runs(runs, options["host"], options["port"], limits, print_line)
    else:
        from grpo_dist.tools.report.command import write_report  # imports pyarrow

        write_report(runs, output, limits, print_line)


def steps_of(text: str) -> tuple[int, ...]:
    """Parse a list of steps: 1,10,50-52 -> (1, 10, 50, 51, 52). Raises UserError."""
    chosen: list[int] = []
    for item in filter(None, text.split(",")):
        first, dash, last = item.strip().partition("-")
        numbers = (first, last) if dash else (first,)
        where = f"--token-steps {text[:40]}: {item[:40]!r}"
        if not all(number.isdecimal() for number in numbers):
            raise UserError(f"{where} is not a step; expected e.g. 1,10,50-60")
        # Texts first: Python refuses to convert very long ones.
        if any(len(number) > len(str(_STEPS)) for number in numbers) or int(numbers[-1]) > _STEPS:
            raise UserError(f"{where}: expected steps up to {_STEPS}, e.g. 1,10,50-60")
        steps = range(int(first), int(numbers[-1]) + 1)
        if not steps:
            raise UserError(f"{where} is not a step; expected e.g. 1,10,50-60")
        if len(chosen) + len(steps) > _STEPS:
            raise UserError(f"{where}: expected at most {_STEPS} steps in all, e.g. 1,10,50-60")
        chosen += steps
    return tuple(chosen)
