"""Chosen steps under the profiler: what each rank's operators took, and what every actor did meanwhile.

    RUN/profile/step_000003_policy-0.json.gz    the update of step 3 on rank 0, by torch's profiler
    RUN/profile/timeline.json                   all actors' stages in the chosen steps

Both open in https://ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from grpo_dist.config import ProfileConfig
from grpo_dist.observe.trace import write_trace
from grpo_dist.runtime.files import clear, publish
from grpo_dist.runtime.json_files import kept_lines
from grpo_dist.runtime.metering import Span

TRACES = "profile"
TIMELINE = "timeline.jsonl"  # what each actor did when, a line a step


@contextmanager
def profiled(path: Path | None, settings: ProfileConfig) -> Iterator[None]:
    """The block under torch's profiler, its trace at ``path``; None: as ever."""
    if path is None:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        record_shapes=settings.shapes,
        with_stack=settings.stacks,
        profile_memory=settings.memory,
    ) as found:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial.{path.name}")  # torch compresses what ends in .gz
    clear(partial)
    found.export_chrome_trace(str(partial))
    publish(partial, path)


def trace_path(run_dir: Path, step: int, rank: int) -> Path:
    return run_dir / TRACES / f"step_{step:06d}_policy-{rank}.json.gz"


def write_timeline(run_dir: Path, steps: Collection[int]) -> None:
    """What `timeline.jsonl` tells of ``steps``, as a trace whose clock begins with the first of them. A line
    may be on its way into the file meanwhile.
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
