"""Faults at random moments: a group of them strikes, and when all are over, the next does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from .events import Event
from .faults import Fault, Skip
from .job import Job

_POLL_S = 0.05
_FAMILY_S = 0.5  # between two looks at who belongs to the job
STILL_S = 1800.0  # a job that finishes no step for so long is stuck, also on a busy machine
_LEFT = 4  # steps: nearer to its end nothing is done to a job
_USELESS = 3  # launches in a row that finish no step, though nothing was done to them
_BETWEEN_S = 2.0  # at most, from the end of one group to the next
_STARTING_S = 20.0  # a start is disturbed within it

Group = Sequence[Fault]


class Stuck(Exception):
    """The job does not get on, or does not start any more."""


@dataclass
class Plan:
    """What is still to happen: groups while the job is in its steps, one after the other, and single faults
    while it starts, at every other start.
    """

    groups: list[Group]
    starting: list[Fault]

    def __bool__(self) -> bool:
        return bool(self.groups or self.starting)


class Play:
    """One job and what it goes through; ``events`` are what it did. ``say`` is told of each."""

    def __init__(self, job: Job, plan: Plan, *, steps: int, rng: Random, say: Callable[[str], None]) -> None:
        self._job, self._plan, self._steps, self._rng, self._say = job, plan, steps, rng, say
        self.events: list[Event] = []
        self.skipped: dict[str, str] = {}
        self._open: list[tuple[Fault, Event]] = []
        self._surprise: float | None = None  # when the start that is under way is disturbed
        self._looked = 0.0
        self._moved = time.monotonic()
        self._told = 0
        self._useless = 0
        self._done = False

    def run(self) -> None:
        """Until the job is done. What it does not come to stays in the plan."""
        self._launch()
        groups = self._plan.groups
        while groups and self._wait(self._job.is_warm):
            self._pause(_BETWEEN_S)
            # Some want a certain moment: then at once.
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
        """Until ``condition``, then true, or until the job is done. One that ends before is started again."""
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
        # Before the job is asked whether it has ended: what was over by then has not been cut short.
        self._open = [(fault, event) for fault, event in self._open if not event.look(self._job)]
        if (end := self._job.poll()) is not None:
            self._ended(end.code)
        elif self._surprise is not None and now >= self._surprise:
            self._surprise = None
            if self._plan.starting[0].ready(self._job):
                self._strike(self._plan.starting.pop(0))
        if (count := len(self._job.steps())) != self._told:
            self._told, self._moved = count, now
        elif now - self._moved > STILL_S:
            raise Stuck(f"no step finished for {STILL_S:.0f} s after step {self._job.last_step()}")

    def _ended(self, code: int) -> None:
        self._useless = 0 if self._open or self._job.was_warm() else self._useless + 1
        for fault, event in self._open:
            if event.exit_code is None:  # the first launch that it ended
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
