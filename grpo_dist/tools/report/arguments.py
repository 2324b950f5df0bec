"""The command line of `grpo-dist report`. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from grpo_dist.errors import UserError

_ROLLOUTS, _TOKENS = 100_000, 400_000


def add_report(commands: Any) -> None:
    text = (
        "what happened in one run or several, as one HTML file that needs nothing but a browser: curves, a "
        "timeline of the actors, settings, events, and every rollout token by token"
    )
    sub = commands.add_parser("report", help=text, description=text)
    sub.add_argument("config", nargs="+", metavar="RUN", help="run directory, e.g. runs/demo")
    sub.add_argument("--output", metavar="FILE", help="default report.html in the run, of several runs here")
    sub.add_argument("--serve", action="store_true", help="show it over HTTP instead, and follow the runs")
    sub.add_argument("--port", type=int, default=8686, help="of --serve (default 8686; 0: any that is free)")
    sub.add_argument(
        "--host",
        default="127.0.0.1",
        help="of --serve: who may reach it may read the runs (default 127.0.0.1)",
    )
    sub.add_argument(
        "--rollouts", type=int, default=_ROLLOUTS, metavar="N",
        help=f"of each run, the newest (default {_ROLLOUTS})",
    )  # fmt: skip
    sub.add_argument(
        "--token-values", type=int, default=_TOKENS, metavar="N",
        help=f"tokens in the file that have log-prob, ratio, advantage and KL, all runs together "
        f"(default {_TOKENS}; --serve has them all)",
    )  # fmt: skip
    sub.add_argument(
        "--token-steps", default="", metavar="STEPS",
        help="of these steps, e.g. 1,10,50-60; default the newest",
    )  # fmt: skip
    sub.set_defaults(command=_report, overrides=[])


def _report(
    runs: list[str],
    overrides: list[str],
    output: str | None,
    serve: bool,
    port: int,
    host: str,
    rollouts: int,
    token_values: int,
    token_steps: str,
) -> None:
    if overrides:
        raise UserError(f"{overrides[0]}: a report takes run directories, no settings")
    if serve and output:
        raise UserError(f"--output {output}: --serve writes no file; leave out one of the two")
    for name, number in (("--rollouts", rollouts), ("--token-values", token_values)):
        if number < 0:
            raise UserError(f"{name} {number}: expected a number that is not negative")
    from grpo_dist.tools.report.source import ReportLimits

    limits = ReportLimits(rollouts, token_values, steps_of(token_steps))
    if serve:
        from grpo_dist.tools.report.server import serve as serve_runs

        serve_runs(runs, host, port, limits, _say)
    else:
        from grpo_dist.tools.report.command import write_report

        write_report(runs, output, limits, _say)


def steps_of(text: str) -> tuple[int, ...]:
    """1,10,50-52 -> (1, 10, 50, 51, 52). Raises UserError."""
    found: list[int] = []
    for item in filter(None, text.split(",")):
        first, dash, last = item.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UserError(f"--token-steps {text}: {item!r} is no step; expected e.g. 1,10,50-60")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _say(message: str) -> None:
    print(message, flush=True)
