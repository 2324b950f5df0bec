"""Metrics, timeline, events and ledger of a run: JSON lines in parts. Only changed parts are re-encoded, so
that all lines are never in memory at once.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_dist.loop.ledger import REASONS, TRAINED
from grpo_dist.runtime.files import check_regular

Line = dict[str, Any]
_LARGEST = 1e300  # larger integers do not fit a float


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoding of some lines.

    Attributes:
        weight: counts towards `most` of `LineFile`.
        light: small replacement for ``payload`` if a file exceeds its `most`.
    """

    payload: Any
    weight: int = 0
    light: Any = None


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive lines; ``version`` changes with their content."""

    version: str
    encoded: Encoded
    dropped: bool = False

    @property
    def payload(self) -> Any:
        """The lines' encoding; the light one if ``dropped``."""
        return self.encoded.payload


class LineFile:
    """A file of JSON objects, one per line, that may grow, shrink or be rewritten between two reads.

    Args:
        encode: returns the payload of some lines.
        per_part: lines per part.
        most: maximum total weight of kept payloads, newest first; the newest part always stays.
    """

    def __init__(
        self,
        path: Path,
        encode: Callable[[list[Line]], Encoded],
        *,
        per_part: int = 200,
        most: int | None = None,
    ) -> None:
        self._path, self._encode, self._per_part, self._most = path, encode, per_part, most
        self._seen: tuple[int, int, int] | None = None
        self.parts: list[Part] = []
        self.torn = 0  # lines that are not JSON objects
        self.left_out = 0  # parts with only the light payload

    def look(self) -> None:
        """Update ``parts``; a missing file has no parts."""
        try:
            status = self._path.stat()
            check_regular(self._path)
            seen = (status.st_ino, status.st_size, status.st_mtime_ns)
            if seen != self._seen:
                self._read()
                self._seen = seen
        except FileNotFoundError:
            self._seen, self.parts, self.torn, self.left_out = None, [], 0, 0

    def _read(self) -> None:
        old, torn, kept_weight, first = self.parts, 0, 0, 0
        parts: list[Part] = []
        with self._path.open("rb") as file:
            while raw := list(islice(file, self._per_part)):
                version = f"{zlib.crc32(b''.join(raw)):08x}-{len(raw)}"
                lines = [line for line in map(_parsed, raw) if line is not None]
                torn += len(raw) - len(lines)
                part = old[len(parts)] if len(parts) < len(old) else None
                if part is None or part.version != version or part.dropped:
                    part = Part(version, self._encode(lines))
                parts.append(part)
                kept_weight += part.encoded.weight
                while self._most is not None and kept_weight > self._most and first < len(parts) - 1:
                    oldest = parts[first].encoded
                    kept_weight -= oldest.weight
                    parts[first] = Part(parts[first].version, Encoded(oldest.light), dropped=True)
                    first += 1
        self.parts, self.torn, self.left_out = parts, torn, first


def packed(value: Any) -> bytes:
    """Compress ``value`` as JSON. All text survives: lone surrogates and NULs are escaped."""
    return gzip.compress(json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), 6, mtime=0)


def _parsed(raw: bytes) -> Line | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


# Encodings: columns instead of objects


def metrics(lines: list[Line]) -> Encoded:
    """Encode {"step": [1, 2], "columns": {"reward/mean": [0.5, null]}}, numbers to 7 digits."""
    steps = [line for line in lines if isinstance(line.get("step"), int)]
    names = dict.fromkeys(name for line in steps for name in line if name != "step")
    columns = {name: [_number(line.get(name)) for line in steps] for name in names}
    return Encoded(packed({"step": [line["step"] for line in steps], "columns": columns}))


def timeline(lines: list[Line]) -> Encoded:
    """Encode two pieces: "clock", with start and end of each step in seconds of `time.time`, and "spans":

        {"workers": [...], "stages": [...], "steps": [[step, origin, [worker, stage, begin, length, ...]]]}

    with four numbers per span: two indices, start in milliseconds from the step's origin, and length. The
    light payload has the clock, and None for the spans.
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
    """Sum several `ledger` payloads, without zeros."""
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
