"""Faults that struck the job, and when it recovered."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from .find import lives
from .job import Job

# Roles whose workers the job replaces and reports.
SUPERVISED = ("rollout", "reward", "reward-model-quality", "reference", "environment")
# Also the role that restarts from a checkpoint as a whole.
MISSED = (*SUPERVISED, "policy")


@dataclass
class Event:
    """A fault of ``kind`` at time ``at``. The victim was in ``phase``, and ``step`` steps were finished."""

    kind: str
    at: float
    step: int
    phase: str
    role: str | None = None
    victim: psutil.Process | None = None
    noticed: float | None = None  # when the job reported the loss of the worker
    recovered: float | None = None
    exit_code: int | None = None  # exit code of the launch, if it ended before recovery
    launch_ended: int | None = None  # number of that launch
    torn: str | None = None  # the checkpoint file that was damaged

    def look(self, job: Job) -> bool:
        """Return whether the job has recovered: the victim is gone, its replacement serves or the run has
        resumed from a checkpoint, and the run has finished a further step.
        """
        if self.victim is not None and lives(self.victim):
            return False
        if self.victim is not None and self.role is None and self.exit_code is None:
            return False  # the driver is gone, but `Job.poll` has not reported the end of the launch
        since = self.at
        if self.role in MISSED and self.exit_code is None:
            self.noticed = self.noticed or self._reported_at(job, "is lost")
        if self.role in SUPERVISED and self.exit_code is None:
            served = self._reported_at(job, "serves again")
            if served is None:
                return False
            since = served
        # The launch may have finished further steps before it ended.
        after = self.at if self.launch_ended is None else job.ends[self.launch_ended].at
        if self.role == "policy" and self.exit_code is None:
            again = [x.at for x in list(job.lines) if x.at > self.at and "resuming from" in x.text]
            if not again:
                return False
            since = after = again[0]
        further = [at for at, step in job.steps() if step > self.step and at > after]
        if not further:
            return False
        self.recovered = max(since, further[0])
        return True

    def _reported_at(self, job: Job, words: str, role: str | None = None) -> float | None:
        """Return when the job, after this event, first printed ``words`` about ``role`` (None: the event's).
        Another Ray thread's output may precede them on the line, up to the "m" that ends a colour code.
        """
        pattern = re.compile(rf"{role or self.role}-\d+ {words}")
        lines = (line for line in list(job.lines) if line.at > self.at)
        return next((line.at for line in lines if pattern.search(line.text)), None)


@dataclass
class Visit(Event):
    """A node was added; it is removed, with notice, once an engine has joined on it (``noticed``)."""

    announce: Callable[[], None] = lambda: None  # gives notice of the removal
    take: Callable[[], None] = lambda: None
    taken: bool = False

    def look(self, job: Job) -> bool:
        """Return whether the engine joined and left, the node is gone, and a further step is finished."""
        if self.noticed is None:
            self.noticed = self._reported_at(job, "has joined", "rollout")
            if self.noticed is not None:
                self.announce()
            return False
        left = self._reported_at(job, "has left", "rollout")
        if left is None:
            return False
        self.end()
        further = [at for at, step in job.steps() if step > self.step and at > left]
        self.recovered = further[0] if further else None
        return self.recovered is not None

    def end(self) -> None:
        """Remove the node, once."""
        if not self.taken:
            self.taken = True
            self.take()
