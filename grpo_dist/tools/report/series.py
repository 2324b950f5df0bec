"""Metrics, timeline, events and ledger of a run for the page: columns, not objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpo_dist.loop.ledger import REASONS, TRAINED
from grpo_dist.tools.report.line_files import Encoded, Line, packed

_LARGEST = 1e300  # larger integers have no float


def metrics(lines: list[Line]) -> Encoded:
    """Encode {"step": [1, 2], "columns": {"reward/mean": [0.5, null]}}, numbers to 7 digits."""
    steps = [line for line in lines if isinstance(line.get("step"), int)]
    names = dict.fromkeys(name for line in steps for name in line if name != "step")
    columns = {name: [_number(line.get(name)) for line in steps] for name in names}
    return Encoded(packed({"step": [line["step"] for line in steps], "columns": columns}))


def timeline(lines: list[Line]) -> Encoded:
    """Encode the pieces "clock", with begin and end of each step in seconds of `time.time`, and "spans":

        {"workers": [...], "stages": [...], "steps": [[step, origin, [worker, stage, begin, length, ...]]]}

    with four numbers per span: two indices, begin in milliseconds from the step's origin, and length. The
    light payload keeps the clock and has None for the spans.
    """
    workers: dict[str, int] = {}
    stages: dict[str, int] = {}
    clock: dict[str, list[Any]] = {"step": [], "begin": [], "end": []}
    steps = []
    count = 0
    for line in lines:
        values = line.get("spans")
        spans = [span for span in values if _is_span(span)] if isinstance(values, list) else []
        if not isinstance(line.get("step"), int) or not spans:
            continue
        origin = min(begin for _, _, begin, _ in spans)
        flat: list[int] = []
        for worker, stage, begin, end in spans:
            flat += (
                workers.setdefault(worker, len(workers)),
                stages.setdefault(stage, len(stages)),
                round((begin - origin) * 1e3),
                round((end - begin) * 1e3),
            )
        steps.append([line["step"], round(origin, 3), flat])
        clock["step"].append(line["step"])
        clock["begin"].append(round(origin, 3))
        clock["end"].append(round(max(end for _, _, _, end in spans), 3))
        count += len(spans)
    timeline = {"workers": list(workers), "stages": list(stages), "steps": steps}
    times = packed(clock)
    return Encoded((times, packed(timeline)), weight=count, light=(times, None))


def events(lines: list[Line]) -> Encoded:
    """Encode [[time or null, step or null, message], ...]."""
    entries = [
        [_number(line.get("time")), _number(line.get("step")), str(line["message"])]
        for line in lines
        if "message" in line
    ]
    return Encoded(packed(entries))


def ledger(lines: list[Line]) -> Encoded:
    """Count prompts by outcome: {"trained": 100, "no_signal": 3}."""
    lists = {name: [line[name] for line in lines if name in line] for name in (TRAINED, *REASONS)}
    return Encoded({name: sum(len(v) for v in each if isinstance(v, list)) for name, each in lists.items()})


def totals(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sum several `ledger` payloads; leave out zeros."""
    totals: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            totals[name] = totals.get(name, 0) + count
    return {name: count for name, count in totals.items() if count}


def _is_span(span: Any) -> bool:
    """Return True for [worker, stage, begin, end]."""
    if not (isinstance(span, list) and len(span) == 4 and all(isinstance(name, str) for name in span[:2])):
        return False
    return all(_number(time) is not None for time in span[2:])


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(f"{value:.10g}" if abs(value) > 1e8 else f"{value:.7g}")
