"""`grpo-dist check`: finds every problem of a run without starting anything or touching an accelerator.

Checks are independent, so one pass reports every problem. A check is skipped, and says so, where an
earlier one could not read its input: one missing model is one problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from grpo_dist.config import Config
from grpo_dist.config.secrets import masked
from grpo_dist.errors import UserError
from grpo_dist.tools.check.context import CheckFailed, CheckSkipped, Context, NotApplicable
from grpo_dist.tools.check.data import check_cold_start, check_data, check_model, check_prompts
from grpo_dist.tools.check.devices import check_memory, check_placement
from grpo_dist.tools.check.environments import check_environments
from grpo_dist.tools.check.machine import check_disk, check_ports, check_resume, check_shared_memory
from grpo_dist.tools.check.own_code import check_own_code
from grpo_dist.tools.check.rewards import check_reward
from grpo_dist.tools.check.settings import check_batch, check_settings, check_tracking, check_versions

CHECKS: dict[str, Callable[[Context], str]] = {
    "versions": check_versions,
    "settings": check_settings,
    "own code": check_own_code,
    "data": check_data,
    "model": check_model,
    "cold start": check_cold_start,
    "prompts": check_prompts,
    "environments": check_environments,
    "batch": check_batch,
    "reward": check_reward,
    "placement": check_placement,
    "memory": check_memory,
    "disk": check_disk,
    "resume": check_resume,
    "shared memory": check_shared_memory,
    "ports": check_ports,
    "trackers": check_tracking,
}
_OF_THIS_MACHINE = ("disk", "resume", "shared memory", "ports")


@dataclass(frozen=True)
class CheckResult:
    """``detail``: what the check found, or why it is ``skipped``. ``problem``: the user must fix it."""

    name: str
    detail: str
    problem: bool = False
    skipped: bool = False

    def __str__(self) -> str:
        mark = "FIX" if self.problem else "-- " if self.skipped else "ok "
        return f"{mark} {self.name}: {'not checked: ' if self.skipped else ''}{masked(self.detail)}"


def run_checks(config: Config, *, cluster: str | None) -> Iterator[CheckResult]:
    """Yield each result as soon as it is known. ``cluster``: where the run will be, as `plan` takes it; None:
    this machine, or the Ray cluster that the configuration names.
    """
    context = Context(config, cluster)
    elsewhere = cluster is not None or context.is_elsewhere
    reported: set[str] = set()
    for name, check in CHECKS.items():
        where = "on this machine, which may not be a node of the run: "
        where = where if elsewhere and name in _OF_THIS_MACHINE else ""
        try:
            yield CheckResult(name, where + check(context))
        except NotApplicable:
            continue
        except CheckSkipped as error:
            yield CheckResult(name, str(error), skipped=True)
        except (CheckFailed, UserError, ValueError, OSError) as error:
            found = error.problems if isinstance(error, CheckFailed) else [str(error)]
            fresh = [problem for problem in found if problem not in reported]
            reported.update(fresh)
            if not fresh:
                yield CheckResult(name, "fix the same problem above first", skipped=True)
            yield from (CheckResult(name, where + problem, problem=True) for problem in fresh)


def problems(results: Sequence[CheckResult]) -> UserError | None:
    """Return one error with all problems, or None."""
    wrong = [f"{result.name}: {result.detail}" for result in results if result.problem]
    if not wrong:
        return None
    if len(wrong) == 1:
        return UserError(wrong[0])
    return UserError(f"{len(wrong)} things to fix: " + "\n  ".join(wrong))


def summary(results: Sequence[CheckResult]) -> str:
    """Return how many checks passed, and the names of those that were skipped."""
    skipped = [result.name for result in results if result.skipped]
    passed = sum(not result.problem and not result.skipped for result in results)
    return f"{passed} checks passed" + (f"; not checked: {', '.join(skipped)}" if skipped else "")
