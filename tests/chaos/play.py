"""Strikes groups of faults at random moments; the next group follows when the job has recovered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .events import Event
from .faults import Fault, Skip
from .job import Job

_POLL_S = 0.05
_FAMILY_S = 0.5  # interval of scans for processes of the job
STILL_S = 1800.0  # a job without a finished step for this long is stuck, even on a busy machine
_LEFT = 4  # no fault strikes in the last steps of a job
_USELESS = 3  # consecutive undisturbed launches without a finished step
_BETWEEN_S = 2.0  # longest pause between groups
_STARTING_S = 20.0  # a start is disturbed within this time

Group = Sequence[Fault]


class Stuck(Exception):
    """The job makes no progress or no longer starts."""


@dataclass
class Plan:
    """Remaining faults: groups that strike during steps, and single ones that strike every other start."""

    groups: list[Group]
    starting: list[Fault]

    def __bool__(self) -> bool:
        return bool(self.groups or self.starting)


class Play:
    """Plays a plan on one job. ``events`` are the faults that struck; each is reported to ``say``."""

    def __init__(self, job: Job, plan: Plan, *, steps: int, rng: Random, say: Callable[[str], None]) -> None:
        self._job, self._plan, self._steps, self._rng, self._say = job, plan, steps, rng, say
        self.events: list[Event] = []
        self.skipped: dict[str, str] = {}
        self._open: list[tuple[Fault, Event]] = []
        self._surprise: float | None = None  # when the current start will be disturbed
        self._looked = 0.0
        self._moved = time.monotonic()
        self._seen_steps = 0
        self._useless = 0
        self._done = False

    def run(self) -> None:
        """Run until the job finishes. Faults that did not strike stay in the plan."""
        self._launch()
        groups = self._plan.groups
        while groups and self._wait(self._job.is_warm):
            self._pause(_BETWEEN_S)
            # Some faults wait for a certain moment and then strike at once.
            if self._wait(lambda: all(f.ready(self._job) for f in groups[0])):
                if self._job.last_step() > self._steps - _LEFT:
                    break
                for fault in groups.pop(0):
                    self._strike(fault)
                self._wait(lambda: not self._open)
        self._wait(lambda: False)

    def _strike(self, fault: Fault) -> None:
        try:
            event = fault.strike(self._job, self._rng)
        except Skip as reason:
            self.skipped[fault.kind] = str(reason)
            return
        self._open.append((fault, event))
        self.events.append(event)
        self._say(f"step {event.step}: {event.kind} ({event.phase})")

    def _pause(self, most_s: float) -> None:
        until = time.monotonic() + self._rng.uniform(0, most_s)
        self._wait(lambda: time.monotonic() >= until)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for ``condition``; False if the job finishes first. Restarts a launch that ends early."""
        while not self._done:
            self._tend()
            if condition():
                return True
            time.sleep(_POLL_S)
        return False

    def _tend(self) -> None:
        now = time.monotonic()
        if now - self._looked > _FAMILY_S:
            self._job.family.living()
            self._looked = now
        # Before polling the job: an event that is over now was not cut short by the job's end.
        self._open = [(fault, event) for fault, event in self._open if not event.look(self._job)]
        if (end := self._job.poll()) is not None:
            self._ended(end.code)
        elif self._surprise is not None and now >= self._surprise:
            self._surprise = None
            if self._plan.starting[0].ready(self._job):
                self._strike(self._plan.starting.pop(0))
        if (count := len(self._job.steps())) != self._seen_steps:
            self._seen_steps, self._moved = count, now
        elif now - self._moved > STILL_S:
            raise Stuck(f"no step finished for {STILL_S:.0f} s after step {self._job.last_step()}")

    def _ended(self, code: int) -> None:
        self._useless = 0 if self._open or self._job.was_warm() else self._useless + 1
        for fault, event in self._open:
            if event.exit_code is None:  # the first launch that this event ended
                event.exit_code, event.launch_ended = code, len(self._job.ends) - 1
                fault.while_down(self._job, self._rng, event)
        if code == 0:
            self._open, self._done = [], True
            return
        self._say(f"ended with {code} after step {self._job.last_step()}")
        if self._useless >= _USELESS:
            raise Stuck(f"{_USELESS} launches in a row finished no step, the last ended with {code}")
        self._launch()

    def _launch(self) -> None:
        self._job.launch()
        disturbed = self._plan.starting and len(self._job.begins) % 2
        self._surprise = time.monotonic() + self._rng.uniform(0, _STARTING_S) if disturbed else None
