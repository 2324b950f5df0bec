"""`grpo-dist check`: finds every problem of a run without starting anything or touching an accelerator.

The checks are those that a run makes before it starts (`runs.start`), and what only estimates it or looks at
this machine. They are independent, so one pass reports every problem. A check is skipped, and reported as
such, where an earlier one could not read its input: one missing model is one problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from grpo_dist.config import Config
from grpo_dist.config.secrets import masked
from grpo_dist.errors import UserError
from grpo_dist.runs.run_directory import (
    choose_run_dir,
    read_template_date,
    set_template_date,
)
from grpo_dist.runs.run_weights import restore_begun
from grpo_dist.runs.start import CHECKS as CHECKS_OF_A_RUN
from grpo_dist.runs.start import resolve_steps
from grpo_dist.runs.trials import CheckFailed, CheckSkipped, Start
from grpo_dist.tools.check.devices import Place, check_memory, check_placement
from grpo_dist.tools.check.machine import (
    check_batch,
    check_disk,
    check_ports,
    check_resume,
    check_shared_memory,
    check_tracking,
    check_versions,
)

_Check = Callable[[Start, Place], str]


def _of_a_run(check: Callable[[Start], str]) -> _Check:
    return lambda start, place: check(start)


# In the order in which they are made.
_CHECKS: dict[str, _Check] = {
    "versions": _of_a_run(check_versions),
    **{name: _of_a_run(check) for name, check in CHECKS_OF_A_RUN.items()},
    "batch": _of_a_run(check_batch),
    "placement": check_placement,
    "memory": check_memory,
    "disk": _of_a_run(check_disk),
    "resume": _of_a_run(check_resume),
    "shared memory": _of_a_run(check_shared_memory),
    "ports": _of_a_run(check_ports),
    "trackers": _of_a_run(check_tracking),
}
CHECKS = tuple(_CHECKS)
_OF_THIS_MACHINE = ("disk", "resume", "shared memory", "ports")
_NO_PROBLEM_ELSEWHERE = ("disk", "shared memory", "ports")


@dataclass(frozen=True)
class CheckResult:
    """``detail``: what the check found, or why it is ``skipped``. ``problem``: the user must fix it.
    ``note``: a problem of this machine, which the nodes of the run need not have.
    """

    name: str
    detail: str
    problem: bool = False
    skipped: bool = False
    note: bool = False

    def __str__(self) -> str:
        mark = "FIX" if self.problem else "-- " if self.skipped else "?? " if self.note else "ok "
        return f"{mark} {self.name}: {'not checked: ' if self.skipped else ''}{masked(self.detail)}"


def run_checks(config: Config, *, cluster: str | None) -> Iterator[CheckResult]:
    """Yield each result as soon as it is known. ``cluster``: where the run will be, as `plan` takes it; None:
    this machine, or the Ray cluster that the configuration names.
    """
    run_dir = choose_run_dir(config.checkpoint, config.name, config.output_dir)
    notes: list[str] = []
    with suppress(ValueError):  # a model that is not there is the finding of a check
        config = restore_begun(config, run_dir, notes.append)
    with suppress(ValueError, OSError):  # nor rows that cannot be read
        config = resolve_steps(config, notes.append)
    config = set_template_date(config, read_template_date(run_dir))
    for note in notes:
        yield CheckResult("settings", note)
    place = Place(config, cluster)
    start = Start(config, notes.append, find_device=lambda: place.device)
    reported: set[str] = set()
    for name, check in _CHECKS.items():
        elsewhere = name in _OF_THIS_MACHINE and place.may_be_elsewhere
        where = "on this machine, which may not be a node of the run: " if elsewhere else ""
        notes.clear()
        try:
            if detail := "\n    ".join(filter(None, [check(start, place), *notes])):
                yield CheckResult(name, where + detail)
        except CheckSkipped as reason:
            yield CheckResult(name, str(reason), skipped=True)
        except (UserError, ValueError, OSError) as error:
            problems = error.problems if isinstance(error, CheckFailed) else [str(error)]
            fresh = [problem for problem in problems if problem not in reported]
            reported.update(fresh)
            if not fresh:
                yield CheckResult(name, "fix the same problem above first", skipped=True)
            is_note = elsewhere and name in _NO_PROBLEM_ELSEWHERE
            for problem in fresh:
                yield CheckResult(name, f"{where}{problem}", problem=not is_note, note=is_note)


def problems(results: Sequence[CheckResult]) -> UserError | None:
    """Return an error with the names of the checks that found problems; None without any."""
    wrong = [result.name for result in results if result.problem]
    if not wrong:
        return None
    things = "1 thing" if len(wrong) == 1 else f"{len(wrong)} things"
    return UserError(f"{things} to fix, marked FIX above: {', '.join(dict.fromkeys(wrong))}")


def summary(results: Sequence[CheckResult]) -> str:
    """Return how many checks passed, and the names of those that were skipped."""
    skipped = [result.name for result in results if result.skipped]
    passed = sum(not (result.problem or result.skipped or result.note) for result in results)
    return f"{passed} checks passed" + (f"; not checked: {', '.join(skipped)}" if skipped else "")
