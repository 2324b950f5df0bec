"""`grpo-dist check`: finds every problem of a run without starting anything or touching an accelerator.

Checks are independent, so one pass reports every problem. A check is skipped, and reported as such, where an
earlier one could not read its input: one missing model is one problem.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from grpo_dist.config import Config
from grpo_dist.config.secrets import masked
from grpo_dist.errors import UserError
from grpo_dist.tools.check.data import check_cold_start, check_data, check_model, check_prompts
from grpo_dist.tools.check.devices import check_memory, check_placement
from grpo_dist.tools.check.environments import check_environments
from grpo_dist.tools.check.inputs import (
    CheckedRun,
    CheckFailed,
    CheckSkipped,
    Inputs,
    NotApplicable,
    ReadInput,
    fail,
)
from grpo_dist.tools.check.machine import check_disk, check_ports, check_resume, check_shared_memory
from grpo_dist.tools.check.own_code import check_own_code
from grpo_dist.tools.check.rewards import check_reward
from grpo_dist.tools.check.settings import check_batch, check_settings, check_tracking, check_versions

# In the order in which they are made: of the settings, then of what they name, which is read, and of all.
_OF_THE_TARGET: dict[str, Callable[[CheckedRun], str]] = {
    "versions": check_versions,
    "settings": check_settings,
    "own code": check_own_code,
}
_OF_THE_INPUTS: dict[str, Callable[[Inputs], str]] = {
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
CHECKS = (*_OF_THE_TARGET, "data", "model", "cold start", "prompts", *_OF_THE_INPUTS)
_OF_THIS_MACHINE = ("disk", "resume", "shared memory", "ports")

T = TypeVar("T")


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
    target = CheckedRun(config, cluster)
    reporter = _Reporter(elsewhere=cluster is not None or target.is_elsewhere)
    for name, check in _OF_THE_TARGET.items():
        yield from reporter.words(name, partial(check, target))
    rows = yield from reporter.reading("data", partial(check_data, target))
    model_dir = yield from reporter.reading("model", partial(check_model, target))
    longest = yield from reporter.reading("cold start", partial(check_cold_start, target, model_dir))
    prepared = yield from reporter.reading("prompts", partial(check_prompts, target, rows, model_dir))
    inputs = Inputs(target, rows, model_dir, longest, prepared)
    for name, check_of_inputs in _OF_THE_INPUTS.items():
        yield from reporter.words(name, partial(check_of_inputs, inputs))


class _Reporter:
    """Makes checks and yields their results; a problem that was reported is not repeated.

    Args:
        elsewhere: the run may be on another machine than this one.
    """

    def __init__(self, *, elsewhere: bool) -> None:
        self._elsewhere = elsewhere
        self._reported: set[str] = set()

    def words(self, name: str, check: Callable[[], str]) -> Iterator[CheckResult]:
        yield from self.reading(name, lambda: ReadInput(check(), None))

    def reading(self, name: str, check: Callable[[], ReadInput[T]]) -> Generator[CheckResult, None, T | None]:
        """Yield the results of ``check``; return the value that it has read, None where it could not."""
        where = "on this machine, which may not be a node of the run: "
        where = where if self._elsewhere and name in _OF_THIS_MACHINE else ""
        value = None
        try:
            found = check()
            value = found.value
            fail(found.problems)
            yield CheckResult(name, where + found.words)
        except NotApplicable:
            pass
        except CheckSkipped as error:
            yield CheckResult(name, str(error), skipped=True)
        except (CheckFailed, UserError, ValueError, OSError) as error:
            problems = error.problems if isinstance(error, CheckFailed) else [str(error)]
            fresh = [problem for problem in problems if problem not in self._reported]
            self._reported.update(fresh)
            if not fresh:
                yield CheckResult(name, "fix the same problem above first", skipped=True)
            yield from (CheckResult(name, where + problem, problem=True) for problem in fresh)
        return value


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
