"""`grpo-dist gpu-check`: its arguments, and how it ends."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_dist.errors import IncompleteCheck, RunEnded, UserError, expanded, refusals
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.tools.arguments import add_command
from grpo_dist.tools.gpu_check.lines import DEVICE, JOBS, CheckJob

if TYPE_CHECKING:
    from grpo_dist.tools.gpu_check.record import CheckRecord
    from grpo_dist.tools.gpu_check.run import CheckOptions

_TEXT = (
    "check what holds on a machine with GPUs and what does not; 0: all holds, 1: something does not, 4: "
    "lines were not run for want of time"
)


def add_gpu_check(commands: Any) -> None:
    sub = add_command(commands, "gpu-check", _TEXT, run, config=None, overrides=[])
    sub.add_argument("--list", action="store_true", dest="listed", help="list the lines and what each needs")
    sub.add_argument("--only", action="append", metavar="NAME", help="this line alone; may be repeated")
    sub.add_argument("--rehearse", action="store_true", help="run what needs no GPU, tiny, on the CPU")
    sub.add_argument("--minutes", type=float, default=10.0, help="for all lines together (default: 10)")
    sub.add_argument(
        "--output", default="runs/gpu-check", metavar="DIRECTORY", help="of gpu-check.json and the logs"
    )


def run(
    _: None,
    overrides: list[str],
    *,
    listed: bool,
    only: list[str] | None,
    rehearse: bool,
    minutes: float,
    output: str,
) -> None:
    """Run the check. Raises UserError for input that cannot be used, else as `raise_unless_all_hold`."""
    if overrides:
        raise UserError(f"gpu-check: {' '.join(overrides)}: it takes no settings, only the options of --help")
    if not 0 < minutes < 1e6:
        raise UserError(f"gpu-check: --minutes {minutes:g}: expected a number above 0")
    jobs = chosen_jobs(only or [])
    if listed:
        from grpo_dist.tools.gpu_check.table import print_lines_of_check  # not needed for --help

        print_lines_of_check(jobs)
        return
    # torch takes seconds to load, which --help and --list do not need.
    from grpo_dist.tools.gpu_check.run import CheckOptions, run_check
    from grpo_dist.tools.gpu_check.table import print_record

    directory = expanded(output).absolute()
    options = CheckOptions(directory, jobs, tuple(only or ()), rehearse, minutes)
    with refusals():
        record = run_check(options, print_line)
    print_record(record)
    print_line(f"written: {directory}/gpu-check.json; the output of each line is in the same directory")
    raise_unless_all_hold(record, options)


def raise_unless_all_hold(record: CheckRecord, options: CheckOptions) -> None:
    """Print how many lines hold. Raises RunEnded where one does not, IncompleteCheck where none fails and one
    was not run in the minutes of the check.
    """
    failed, skipped, left = (record.of_state(state) for state in ("fails", "skipped", "not run"))
    total, rest = len(record.lines), f"; {how_to_run([line.name for line in left], options)}" if left else ""
    if failed:
        names = ", ".join(line.name for line in failed)
        raise RunEnded(f"gpu-check: {len(failed)} of {total} lines do not hold: {names}{rest}")
    held = f"gpu-check: {total - len(skipped) - len(left)} lines hold, {len(skipped)} skipped"
    if left:
        raise IncompleteCheck(f"{held}{rest}")
    print_line(f"{held}, in {record.seconds:.0f} s")


def how_to_run(names: Sequence[str], options: CheckOptions) -> str:
    """Return that the lines ``names`` were not run, and the command that runs them alone, whose record does
    not replace that of this check.
    """
    jobs = [job for job in options.jobs if any(line.name in names for line in job.lines)]
    minutes = math.ceil(sum(job.limit_s for job in (DEVICE, *jobs)) / 60)
    words = ["grpo-dist", "gpu-check", *(["--rehearse"] if options.rehearsal else [])]
    words += ["--minutes", str(minutes), "--output", f"{options.directory}-rest"]
    words += [word for name in names for word in ("--only", name)]
    return (
        f"{len(names)} were not run: {', '.join(names)}; run them alone with `{shlex.join(words)}`, or all "
        f"with more than --minutes {options.minutes:g}"
    )


def chosen_jobs(only: list[str]) -> tuple[CheckJob, ...]:
    """Return the jobs of the lines ``only``; all, where that is empty. Raises UserError for unknown names."""
    known = [line.name for job in JOBS for line in job.lines]
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"gpu-check: --only {name}: expected one of {', '.join(known)}{hint}")
    return tuple(job for job in JOBS if not only or any(line.name in only for line in job.lines))
