"""Profiled steps, and the timeline of all actors."""

import asyncio
import gzip
import json

import pytest
import torch

from grpo_dist.config import Config
from grpo_dist.driver import run
from grpo_dist.observe.profiling import profiled, trace_path
from grpo_dist.observe.tracker import Tracker
from grpo_dist.runtime.metering import Span, Usage
from tests.support import fakes


def test_the_block_is_traced_with_the_shapes_of_its_operators(tmp_path):
    path = trace_path(tmp_path, 3, 1)
    assert path == tmp_path / "profile" / "step_000003_policy-1.json.gz"
    with profiled(path):
        torch.ones(7, 11) @ torch.ones(11, 5)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    product = next(e for e in events if e["name"] == "aten::mm")
    assert product["args"]["Input Dims"] == [[7, 11], [11, 5]] and product["dur"] > 0
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_error_under_the_profiler_is_raised_unchanged(tmp_path):
    with pytest.raises(ZeroDivisionError), profiled(tmp_path / "x.json.gz"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_the_loop_traces_the_chosen_steps_before_their_updates():
    world = fakes.World()
    settings = fakes.config(steps=4, profile={"steps": [2, 3]})
    asyncio.run(run(settings, world.workers(), fakes.prompts(40), [], world, world))
    kinds = ("trace", "update")
    order = [e for e in world.events if e.startswith(kinds)]
    assert order == [
        "update at version 0",
        "trace 2", "update at version 1",
        "trace 3", "update at version 2",
        "update at version 3",
    ]  # fmt: skip


def test_the_timeline_of_chosen_steps_has_all_actors_on_one_clock(tmp_path):
    settings = Config(
        model={"path": "x"}, data={"train": [{"path": "x"}]},
        tracking={"console": False, "tensorboard": False}, profile={"steps": [2, 3]},
    )  # fmt: skip
    with Tracker(settings, tmp_path) as tracker:
        for step in (1, 2, 3, 4):
            begin = 1000.0 + 10 * step
            engine = Usage(spans=(Span("sample", begin, begin + 5),))
            rank = Usage(spans=(Span("update", begin + 5, begin + 9),))
            tracker.spans(step, [Span("sample", begin, begin + 5)], {"rollout-0": engine, "policy-0": rank})
    events = json.loads((tmp_path / "profile" / "timeline.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(tracks.values()) == ["driver", "policy-0", "rollout-0"]
    slices = [(tracks[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert sorted(slices) == [
        ("driver", "sample", 0.0, 5e6), ("driver", "sample", 10e6, 5e6),
        ("policy-0", "update", 5e6, 4e6), ("policy-0", "update", 15e6, 4e6),
        ("rollout-0", "sample", 0.0, 5e6), ("rollout-0", "sample", 10e6, 5e6),
    ]  # fmt: skip
    ends = [(e["name"], e["ts"]) for e in events if e["ph"] == "i"]
    assert ends == [("end of step 2", 9e6), ("end of step 3", 19e6)]


def test_steps_after_the_end_are_refused():
    with pytest.raises(ValueError, match=r"`profile.steps` = \[.*9\], `steps` = 4: the run ends before"):
        fakes.config(steps=4, profile={"steps": [2, 9]})
