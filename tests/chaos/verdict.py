"""What must be true of a job that has been through all that. Each check gives None, or what is wrong."""

from __future__ import annotations

import json
import re
import signal
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from .events import MISSED, Event
from .find import Family, title
from .job import Line

Lines = Sequence[Mapping[str, Any]]
# What a machine does differently at every run, and what tells of workers that were replaced.
CLOCK = ("time/", "throughput/", "memory/", "restarts/", "sync/")
_MISMATCH = 1e-5  # nats, of rollout and trainer in float32 under the same weights
_KILLED, _ASKED = -signal.SIGKILL, 75
# Kinds that end a launch, with its exit codes. One that is asked before Python has begun is ended by it.
_ENDS: Mapping[str, tuple[int, ...]] = {
    "SIGKILL driver": (_KILLED,),
    "SIGKILL driver, starting": (_KILLED,),
    "SIGTERM driver": (_ASKED,),
    "SIGTERM driver, starting": (_ASKED, -signal.SIGTERM),
    "torn file": (_KILLED,),
    "disk full": (1,),
}
_LATE_STAGE = re.compile(r"stage (.+?): not finished within ([\d.]+) s")


@dataclass(frozen=True)
class Limits:
    """``noticed_s``: the job notices a lost worker within it; ``node_s``: a lost node. ``agents_s``: how long
    Ray's own processes take to see that their raylet is gone. ``slower``: how many times as long as the
    slowest other recovery of its role one may take.
    """

    noticed_s: float = 15.0
    node_s: float = 45.0
    agents_s: float = 90.0
    slower: float = 1.0


MEASURED = Limits()
# Where other work may take the processor: that something comes at all is what counts.
BUSY = Limits(noticed_s=900.0, node_s=900.0, agents_s=900.0, slower=20.0)
_LOOK_S = 10.0  # that the job takes at most to find out where everybody is, before it says so
_LATE_S = 2.0  # by which two busy cores may hold up a watch


def unbalanced(said: str) -> str | None:
    """By what the run itself says at its end: it knows whose turn each step was."""
    if "\nledger: " not in said:
        return "no totals at the end of the run"
    _, warned, what = said.partition("the ledger does not balance: ")
    return what.partition(". ")[0] if warned else None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def unfinished(lines: Lines, steps: int) -> str | None:
    """A step without a line of metrics, or with two."""
    found = [line["step"] for line in lines]
    return None if found == list(range(1, steps + 1)) else f"metrics of steps {found}, expected 1 to {steps}"


def stale(run_dir: Path, steps: int, max_staleness: int = 0) -> str | None:
    """A sample of weights older than allowed, or newer than there were."""
    for step in range(1, steps + 1):
        path = run_dir / "samples" / f"step_{step:06d}.parquet"
        if not path.exists():
            return f"step {step} has no samples"
        allowed = range(max(0, step - 1 - max_staleness), step)
        for row in pq.read_table(path, columns=["uid", "policy_versions"]).to_pylist():
            if wrong := set(row["policy_versions"]) - set(allowed):
                return f"step {step}, prompt {row['uid']}: tokens of versions {sorted(wrong)}, not {allowed}"
    return None


def mismatched(lines: Lines) -> str | None:
    """An engine that served other weights than it said: the trainer's log-probs are then others."""
    worst = max(lines, key=lambda line: line.get("mismatch/logprob_diff_max") or 0.0)
    found = worst.get("mismatch/logprob_diff_max") or 0.0
    return None if found < _MISMATCH else f"step {worst['step']}: log-probs differ by up to {found:.1e} nats"


def difference(lines: Lines, undisturbed: Lines) -> str | None:
    """The first number that is not that of the undisturbed run, clocks and restarts left out."""
    for ours, theirs in zip(lines, undisturbed, strict=False):
        for key in sorted(ours.keys() | theirs.keys()):
            if not key.startswith(CLOCK) and ours.get(key) != theirs.get(key):
                return f"step {theirs['step']}, {key}: {ours.get(key)}, undisturbed {theirs.get(key)}"
    return None


def unscored(lines: Lines) -> list[int]:
    """Steps with samples that nobody could score, after which other numbers are as they should be."""
    return [line["step"] for line in lines if line.get("reward/unscored")]


def inaccurate(lines: Lines, undisturbed: Lines) -> str | None:
    """A mean reward further from that of the undisturbed run than two standard errors of the difference."""
    ours, theirs = ([line["reward/mean"] for line in own if line["reward/mean"] is not None]
                    for own in (lines, undisturbed))  # fmt: skip
    error = (statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs)) ** 0.5
    means = statistics.mean(ours), statistics.mean(theirs)
    if abs(means[0] - means[1]) <= 2 * error:
        return None
    return f"mean reward {means[0]:.4f}, undisturbed {means[1]:.4f}, standard error {error:.4f}"


def orphans(family: Family, seconds: float) -> str | None:
    """Processes of the job that still live ``seconds`` after it ended: Ray's agents take a while to see that
    their raylet is gone.
    """
    end = time.monotonic() + seconds
    while (left := family.living()) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=1)
    return None if not left else "left behind: " + ", ".join(f"{p.pid} {title(p)[:120]}" for p in left)


def left_in_memory(before: Iterable[str], after: Iterable[str], in_use: Iterable[str] = ()) -> str | None:
    """Files of shared memory that are there ``after`` and were not ``before``, less those that others use."""
    left = sorted(set(after) - set(before) - set(in_use))
    return f"{len(left)} file(s) of shared memory: {', '.join(left[:5])}" if left else None


def unnoticed(events: Sequence[Event], limits: Limits = MEASURED) -> str | None:
    """A lost worker that nobody missed, or too late."""
    for event in events:
        if event.role in MISSED and event.exit_code is None:
            if event.noticed is None:
                return f"{event.kind} at step {event.step} was never noticed"
            within = limits.node_s if event.kind.startswith("node of") else limits.noticed_s
            if (after := event.noticed - event.at) > within + _LATE_S:
                return f"{event.kind} at step {event.step} was noticed after {after:.1f} s"
    return None


def hung(said: Iterable[Line], events: Sequence[Event], limits: Limits = MEASURED) -> str | None:
    """A stage whose deadline passed without anything that was done to the job in that time, or so shortly
    before that it was not noticed yet.
    """
    for line in said:
        if late := _LATE_STAGE.search(line.text):
            begin = line.at - _LOOK_S - float(late[2]) - limits.noticed_s - _LATE_S
            if not any(begin <= event.at <= line.at for event in events):
                return f"stage {late[1]} came to no end in {late[2]} s, and nothing had been done to the job"
    return None


def unrecovered(
    events: Sequence[Event], everywhere: Sequence[Event], last_step_at: float, limits: Limits = MEASURED
) -> str | None:
    """Something that was survived and never made good. ``everywhere``: events of all jobs so far.

    The job may have come to its end before it could: that counts for one that had no more time until the
    last step than recovery of its role took at most elsewhere, both from when it was noticed, which takes
    long for a stopped worker alone. Where none was ever seen to recover, it counts for nothing: with two
    engines a job of a few steps ends soon enough to hide one that never comes back.
    """
    for event in events:
        if event.recovered is not None or event.exit_code:
            continue
        took = [
            other.recovered - (other.noticed or other.at)
            for other in everywhere
            if other.role == event.role and other.recovered is not None and not other.exit_code
        ]
        had = last_step_at - (event.noticed or event.at)
        if event.exit_code is None or had > limits.slower * max(took, default=0.0):
            elsewhere = f"took {max(took):.1f} s at most" if took else "was never seen"
            return f"{event.kind} at step {event.step}: no recovery in {had:.1f} s, elsewhere it {elsewhere}"
    return None


def ended(codes: Sequence[int], events: Sequence[Event]) -> str | None:
    """A launch that ended though nothing was done to it, or of something it should have survived, or with
    another exit code than it should. ``codes``: of all launches; those that end well need no reason.
    """
    for launch, code in enumerate(codes):
        own = [event for event in events if event.launch_ended == launch]
        expected = {end for event in own for end in _ENDS.get(event.kind, ())}
        if code == 0 or code in expected:
            continue
        if not own:
            return f"launch {launch} ended with {code}, and nothing had been done to it"
        what = ", ".join(f"{event.kind} at step {event.step}" for event in own)
        return f"{what} ended the run with {code}, expected {sorted(expected) or 'no end'}"
    return None


def silent(events: Sequence[Event], said: Mapping[int, str]) -> str | None:
    """An end for want of room, or a damaged checkpoint, that the run did not say. ``said``: by launch."""
    for event in events:
        if event.kind == "disk full" and event.launch_ended is not None:
            text = said.get(event.launch_ended, "")
            if event.exit_code == 0 or "No space left on device" not in text:
                return f"disk full at step {event.step}: exit code {event.exit_code}, said {text[-200:]!r}"
        if event.torn and event.launch_ended is not None:
            text = "\n".join(own for launch, own in said.items() if launch > event.launch_ended)
            # A manifest that is torn itself may blame another file.
            named = event.torn == "manifest.json" or event.torn in text
            if "damaged checkpoint, not used" not in text or not named:
                return f"{event.torn} was torn after step {event.step}, and no later launch named it"
    return None
