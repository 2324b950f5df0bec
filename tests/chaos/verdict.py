"""Conditions that must hold after the faults. Each check returns None, or what is wrong."""

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
# Metrics that differ between runs: clocks, memory, and counts of replaced, joined and left workers.
CLOCK = ("time/", "throughput/", "memory/", "restarts/", "sync/", "engines/", "rollout/acceptance_length")
_MISMATCH = 1e-5  # nats between rollout and trainer in float32 with equal weights
_KILLED, _ASKED = -signal.SIGKILL, 75
# Kinds that end a launch, with its exit codes. SIGTERM before Python handles signals ends the process itself.
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
    """Deadlines of the checks.

    Attributes:
        noticed_s, node_s: until a lost worker, a lost node is reported.
        agents_s: until Ray's agents exit after their raylet.
        slower: factor by which a recovery may exceed the slowest other one of its role.
    """

    noticed_s: float = 15.0
    node_s: float = 45.0
    agents_s: float = 90.0
    slower: float = 1.0


MEASURED = Limits()
# For a busy machine, where it only matters that something happens at all.
BUSY = Limits(noticed_s=900.0, node_s=900.0, agents_s=900.0, slower=20.0)
_LOOK_S = 10.0  # the job may take this long to locate its processes before it reports a late stage
_LATE_S = 2.0  # two busy cores may delay a watchdog by this much


def unbalanced(output: str) -> str | None:
    """Check the ledger audit that the run prints at its end."""
    if "\nledger: " not in output:
        return "no totals at the end of the run"
    _, warned, what = output.partition("the ledger does not balance: ")
    return what.partition(". ")[0] if warned else None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def unfinished(lines: Lines, steps: int) -> str | None:
    """Check that every step has exactly one line of metrics."""
    done = [line["step"] for line in lines]
    return None if done == list(range(1, steps + 1)) else f"metrics of steps {done}, expected 1 to {steps}"


def stale(run_dir: Path, steps: int, max_staleness: int = 0) -> str | None:
    """Check that no token has a version older than allowed, or a future one."""
    for step in range(1, steps + 1):
        path = run_dir / "samples" / f"step_{step:06d}.parquet"
        if not path.exists():
            return f"step {step} has no samples"
        allowed = range(max(0, step - 1 - max_staleness), step)
        present = set(pq.read_schema(path).names)
        columns = [name for name in ("uid", "policy_versions", "sampled") if name in present]
        for row in pq.read_table(path, columns=columns).to_pylist():
            if wrong := _sampled_versions(row) - set(allowed):
                return f"step {step}, prompt {row['uid']}: tokens of versions {sorted(wrong)}, not {allowed}"
    return None


def _sampled_versions(row: Mapping[str, Any]) -> set[int]:
    """Return the versions of the sampled tokens; an episode also has tokens of the environment."""
    sampled = row.get("sampled") or [True] * len(row["policy_versions"])
    return {value for value, is_sampled in zip(row["policy_versions"], sampled, strict=True) if is_sampled}


def mismatched(lines: Lines) -> str | None:
    """Check that engines sampled with the weights they reported, by the trainer's log-probs."""
    worst = max(lines, key=lambda line: line.get("mismatch/logprob_diff_max") or 0.0)
    gap = worst.get("mismatch/logprob_diff_max") or 0.0
    return None if gap < _MISMATCH else f"step {worst['step']}: log-probs differ by up to {gap:.1e} nats"


def difference(lines: Lines, undisturbed: Lines) -> str | None:
    """Return the first metric that differs from the undisturbed run, except clocks and restarts."""
    for ours, theirs in zip(lines, undisturbed, strict=False):
        for key in sorted(ours.keys() | theirs.keys()):
            if not key.startswith(CLOCK) and ours.get(key) != theirs.get(key):
                return f"step {theirs['step']}, {key}: {ours.get(key)}, undisturbed {theirs.get(key)}"
    return None


def unscored(lines: Lines) -> list[int]:
    """Return steps with unscored samples, after which metrics may differ."""
    return [line["step"] for line in lines if line.get("reward/unscored")]


def inaccurate(lines: Lines, undisturbed: Lines) -> str | None:
    """Check that the mean reward is within two standard errors of the undisturbed run's."""
    ours, theirs = ([line["reward/mean"] for line in run if line["reward/mean"] is not None]
                    for run in (lines, undisturbed))  # fmt: skip
    error = (statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs)) ** 0.5
    means = statistics.mean(ours), statistics.mean(theirs)
    if abs(means[0] - means[1]) <= 2 * error:
        return None
    return f"mean reward {means[0]:.4f}, undisturbed {means[1]:.4f}, standard error {error:.4f}"


def orphans(family: Family, seconds: float) -> str | None:
    """Check that no process lives ``seconds`` after the end; Ray's agents notice a lost raylet late."""
    end = time.monotonic() + seconds
    while (left := family.living()) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=1)
    return None if not left else "left behind: " + ", ".join(f"{p.pid} {title(p)[:120]}" for p in left)


def left_in_memory(before: Iterable[str], after: Iterable[str], in_use: Iterable[str] = ()) -> str | None:
    """Check for new files of shared memory, except those in use by others."""
    left = sorted(set(after) - set(before) - set(in_use))
    return f"{len(left)} file(s) of shared memory: {', '.join(left[:5])}" if left else None


def unnoticed(events: Sequence[Event], limits: Limits = MEASURED) -> str | None:
    """Check that every lost worker was reported in time."""
    for event in events:
        if event.role in MISSED and event.exit_code is None:
            if event.noticed is None:
                return f"{event.kind} at step {event.step} was never noticed"
            within = limits.node_s if event.kind.startswith("node of") else limits.noticed_s
            if (after := event.noticed - event.at) > within + _LATE_S:
                return f"{event.kind} at step {event.step} was noticed after {after:.1f} s"
    return None


def hung(output: Iterable[Line], events: Sequence[Event], limits: Limits = MEASURED) -> str | None:
    """Check that no stage missed its deadline without a fault during the stage or just before it."""
    for line in output:
        if late := _LATE_STAGE.search(line.text):
            begin = line.at - _LOOK_S - float(late[2]) - limits.noticed_s - _LATE_S
            if not any(begin <= event.at <= line.at for event in events):
                return f"stage {late[1]} came to no end in {late[2]} s, and nothing had been done to the job"
    return None


def unrecovered(
    events: Sequence[Event], everywhere: Sequence[Event], last_step_at: float, limits: Limits = MEASURED
) -> str | None:
    """Check that the job recovered from every fault it survived. ``everywhere``: events of all jobs so far.

    The end of the job is an excuse if the time from detection to the last step was shorter than the slowest
    recovery of this role elsewhere. Without any observed recovery it is no excuse: a short job with two
    engines could hide one that never returns.
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
    """Check the exit codes of all launches: a failed one needs a fault that may end it, and its exit code."""
    for launch, code in enumerate(codes):
        causes = [event for event in events if event.launch_ended == launch]
        expected = {end for event in causes for end in _ENDS.get(event.kind, ())}
        if code == 0 or code in expected:
            continue
        if not causes:
            return f"launch {launch} ended with {code}, and nothing had been done to it"
        what = ", ".join(f"{event.kind} at step {event.step}" for event in causes)
        return f"{what} ended the run with {code}, expected {sorted(expected) or 'no end'}"
    return None


def silent(events: Sequence[Event], output: Mapping[int, str]) -> str | None:
    """Check that the output names a full disk and damaged checkpoints. ``output`` is by launch."""
    for event in events:
        if event.kind == "disk full" and event.launch_ended is not None:
            text = output.get(event.launch_ended, "")
            if event.exit_code == 0 or "No space left on device" not in text:
                return f"disk full at step {event.step}: exit code {event.exit_code}, output {text[-200:]!r}"
        if event.torn and event.launch_ended is not None:
            text = "\n".join(printed for launch, printed in output.items() if launch > event.launch_ended)
            # A torn manifest may blame another file.
            named = event.torn == "manifest.json" or event.torn in text
            if "damaged checkpoint, not used" not in text or not named:
                return f"{event.torn} was torn after step {event.step}, and no later launch named it"
    return None
