"""Why a request to the process of an episode has no result."""

from __future__ import annotations

from functools import partial
from typing import Any


class ProcessFailure(Exception):
    """A request without a result.

    Attributes:
        outcome: timeout | memory | died | error.
        lost: whether the process is gone, and with it what the episode had in it.
        output: what was printed before, cut to ``Limits.output_kb``.
        infrastructure: whether the machine or a service failed, and not the code of the request.
        cpu_s: CPU seconds of the processes that are gone, where they were measured.
        began: False where the process was gone with its zygote before the request, which no code caused.
    """

    def __init__(
        self, outcome: str, detail: str, *, lost: bool = True, output: str = "", infrastructure: bool = False
    ) -> None:
        super().__init__(outcome, detail)
        self.outcome, self.detail, self.lost, self.output = outcome, detail, lost, output
        self.infrastructure = infrastructure
        self.cpu_s, self.began = 0.0, True

    def __str__(self) -> str:
        return self.detail

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(ProcessFailure, lost=self.lost, output=self.output, infrastructure=self.infrastructure)
        return make, (self.outcome, self.detail)


def not_started(reason: str) -> ProcessFailure:
    """Return the failure of an episode that got no process."""
    return ProcessFailure("error", f"it could not be started: {reason}", infrastructure=True)


def lost_zygote(what: str) -> ProcessFailure:
    """Return the failure of an episode whose zygote ``what``."""
    return ProcessFailure("died", f"the process that starts others {what}", infrastructure=True)


def lost_before() -> ProcessFailure:
    """Return the failure of an episode whose process ended with its zygote between two requests."""
    failure = ProcessFailure("died", "the process had ended, with the one that starts others")
    failure.began = False
    return failure
