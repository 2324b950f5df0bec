"""Profiles of chosen steps: the operators of each policy rank, and the stages of all actors.

    RUN/profile/step_000003_policy-0.json.gz    torch profiler trace: rank 0, update of step 3
    RUN/profile/timeline.json                   stages of all actors in the chosen steps

Both open in https://ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_dist.runtime.files import clear, kept_lines, publish, write_text
from grpo_dist.runtime.metering import Span

TRACES = "profile"
TIMELINE = "timeline.jsonl"  # spans of every actor, one line per step


@contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Run the block under torch's profiler and write the trace to ``path``. None disables the profiler."""
    if path is None:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial.{path.name}")  # torch compresses a file whose name ends in .gz
    clear(partial)
    profiler.export_chrome_trace(str(partial))
    publish(partial, path)


def trace_path(run_dir: Path, step: int, rank: int) -> Path:
    return run_dir / TRACES / f"step_{step:06d}_policy-{rank}.json.gz"


def write_timeline(run_dir: Path, steps: Collection[int]) -> None:
    """Write ``steps`` of `timeline.jsonl` as a trace whose clock starts with the first step.

    The file may be appended to at the same time.
    """
    lines = map(json.loads, kept_lines(run_dir / TIMELINE, max(steps)))
    chosen = [line for line in lines if line["step"] in steps]
    origin = min(begin for line in chosen for _, _, begin, _ in line["spans"])
    tracks: dict[str, list[Span]] = {}
    marks: dict[str, float] = {}
    for line in chosen:
        for worker, stage, begin, end in line["spans"]:
            tracks.setdefault(worker, []).append(Span(stage, begin - origin, end - origin))
        marks[f"end of step {line['step']}"] = max(end for *_, end in line["spans"]) - origin
    order = sorted(tracks, key=lambda name: (name != "driver", name.rpartition("-")[0], len(name), name))
    write_trace(run_dir / TRACES / "timeline.json", {name: tracks[name] for name in order}, marks)


def write_trace(path: Path, tracks: Mapping[str, Sequence[Span]], marks: Mapping[str, float]) -> None:
    """Write ``tracks`` in the Trace Event Format, one thread per track, times in microseconds.

    Args:
        tracks: spans in seconds by track name, in display order.
        marks: times in seconds by name, on the clock of the spans.

    Raises OSError.
    """
    events: list[dict[str, Any]] = []
    for number, (track, spans) in enumerate(tracks.items()):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}})
        # Viewers sort threads by number or by name unless they find an index.
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
