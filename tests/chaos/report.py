"""Recovery times by kind of event, and goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .events import Event

_HEAD = ("kind", "events", "ended the run", "noticed", "recovered", "p95", "slowest", "found at")


def table(events: Sequence[Event], skipped: dict[str, str]) -> str:
    """Format one line per kind: median seconds after the event, unless the heading says otherwise."""
    kinds = list(dict.fromkeys(event.kind for event in events))
    rows = [_HEAD, *(_row(kind, [e for e in events if e.kind == kind]) for kind in kinds)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, *(f"{kind}: skipped, {reason}" for kind, reason in skipped.items())])


def _row(kind: str, events: list[Event]) -> tuple[str, ...]:
    ends = Counter(event.exit_code for event in events if event.exit_code)
    noticed = [event.noticed - event.at for event in events if event.noticed is not None]
    recovered = [event.recovered - event.at for event in events if event.recovered is not None]
    phases = Counter(event.phase for event in events)
    return (
        kind, str(len(events)),
        ", ".join(f"{count} x exit {code}" for code, count in sorted(ends.items())) or "-",
        _seconds(noticed, 50), _seconds(recovered, 50), _seconds(recovered, 95), _seconds(recovered, 100),
        ", ".join(f"{phase} {count}" for phase, count in phases.most_common(4)),
    )  # fmt: skip


def _seconds(values: list[float], percentile: float) -> str:
    return f"{np.percentile(values, percentile):.1f} s" if values else "-"


def step_s(steps: Sequence[tuple[float, int]]) -> float:
    """Return seconds per step, without the first step, which warms up."""
    return (steps[-1][0] - steps[0][0]) / (len(steps) - 1)


def goodput(steps: Sequence[tuple[float, int]], undisturbed_s: float) -> float:
    """Return the undisturbed run's time / this run's time, from the first to the last finished step.
    Detection, restarts and repeated steps take the rest.
    """
    wall_s = steps[-1][0] - steps[0][0]
    return (steps[-1][1] - steps[0][1]) * undisturbed_s / wall_s
