"""What happened to the job, and when it was over."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil

from .find import lives
from .job import Job

# Roles whose workers are replaced in the job, and said to be.
SUPERVISED = ("rollout", "reward", "reward-model-quality", "reference")
# Those, and the one that goes back to a checkpoint as a whole.
MISSED = (*SUPERVISED, "policy")


@dataclass
class Event:
    """``kind`` befell the job ``at`` that time; the victim was at ``phase``, and ``step`` steps were done."""

    kind: str
    at: float
    step: int
    phase: str
    role: str | None = None
    victim: psutil.Process | None = None
    noticed: float | None = None  # when the job said that the worker is lost
    recovered: float | None = None
    exit_code: int | None = None  # of the launch, where that ended before this was over
    launch_ended: int | None = None  # its number
    torn: str | None = None  # the file of a checkpoint that was damaged then

    def look(self, job: Job) -> bool:
        """Whether it is over: the victim is gone, the one in its place serves, or all have gone back, and the
        run is a step further than before.
        """
        if self.victim is not None and lives(self.victim):
            return False
        if self.victim is not None and self.role is None and self.exit_code is None:
            return False  # the driver is gone, and its launch will be found to have ended
        since = self.at
        if self.role in MISSED and self.exit_code is None:
            self.noticed = self.noticed or self._said(job, "is lost")
        if self.role in SUPERVISED and self.exit_code is None:
            served = self._said(job, "serves again")
            if served is None:
                return False
            since = served
        # What ended a launch may have let it finish some more steps before.
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

    def _said(self, job: Job, words: str) -> float | None:
        """When the job first said so of this role, after this event. What Ray prints from a thread of its own
        may stand before it in the same line, up to the "m" that ends a colour.
        """
        of_role = re.compile(rf"{self.role}-\d+ {words}")
        lines = (line for line in list(job.lines) if line.at > self.at)
        return next((line.at for line in lines if of_role.search(line.text)), None)
