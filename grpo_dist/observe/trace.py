"""Who was busy with what when, as a picture that chrome://tracing and https://ui.perfetto.dev show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.metering import Span


def write_trace(path: Path, tracks: Mapping[str, Sequence[Span]], marks: Mapping[str, float]) -> None:
    """One file in the Trace Event Format: complete events with microseconds, a thread for each of ``tracks``.

    ``marks``: moments by name, seconds as in the spans. Raises OSError.
    """
    events: list[dict[str, Any]] = []
    for number, (track, spans) in enumerate(tracks.items()):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}})
        # Viewers sort threads by number or by name; this says: as they stand.
        order = {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": number}
        events.append(order | {"args": {"sort_index": number}})
        events += [
            {
                "name": span.stage,
                "cat": track.rpartition("-")[0] or track,
                "ph": "X",
                "ts": span.begin * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "pid": 1,
                "tid": number,
            }
            for span in spans
        ]
    for name, moment in marks.items():
        events.append({"name": name, "ph": "i", "s": "g", "ts": moment * 1e6, "pid": 1, "tid": 0})
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
