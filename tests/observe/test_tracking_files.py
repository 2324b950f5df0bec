"""Timeline and events of a run directory."""

import json

import numpy as np

from grpo_dist.config import Config
from grpo_dist.observe.tracker import EVENTS, TIMELINE, Tracker
from grpo_dist.runtime.files import kept_lines
from grpo_dist.runtime.metering import Span, Usage
from tests.support.made_groups import group


def quiet():
    data = {"train": [{"path": "x"}]}
    return Config(model={"path": "x"}, data=data, tracking={"console": False, "tensorboard": False})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_timeline_has_the_loop_and_every_worker(tmp_path):
    with Tracker(quiet(), tmp_path) as tracker:
        usage = Usage(spans=(Span("sample", 10.00004, 12.5), Span("sample", 13.0, 14.0)))
        tracker.spans(1, [Span("sample", 10.0, 12.6)], {"rollout-0": usage, "policy-0": Usage()})
    spans = [
        ["driver", "sample", 10.0, 12.6],
        ["rollout-0", "sample", 10.0, 12.5], ["rollout-0", "sample", 13.0, 14.0],
    ]  # fmt: skip
    assert lines(tmp_path / TIMELINE) == [{"step": 1, "spans": spans}]


def test_repeated_steps_are_in_the_timeline_once(tmp_path):
    with Tracker(quiet(), tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.spans(step, [Span("update", step, step + 1)], {})
        tracker.back_to(1)
        tracker.spans(2, [Span("update", 20, 21)], {})
    assert [line["step"] for line in lines(tmp_path / TIMELINE)] == [1, 2]
    with Tracker(quiet(), tmp_path, start=1):
        assert [line["step"] for line in lines(tmp_path / TIMELINE)] == [1]


def test_samples_of_repeated_steps_are_removed_and_other_files_stay(tmp_path):
    groups = [group(0, np.random.default_rng(0), rewards=[0, 1, 0, 1])]
    names = [f"{kind}step_{step:06d}" for step in (10, 20, 35) for kind in ("", "eval_held_")]
    with Tracker(quiet(), tmp_path) as tracker:
        for name in names:
            tracker.samples(name, groups)
        tracker.quarantine(35, groups)
    (tmp_path / "samples/mine.parquet").write_text("of the user")
    with Tracker(quiet(), tmp_path, start=20) as tracker:
        remaining = {path.stem for path in (tmp_path / "samples").iterdir()}
        assert remaining == {*names[:4], "mine"}
        assert (tmp_path / "quarantine/step_000035.parquet").is_file()
        tracker.samples("step_000021", groups)
        tracker.back_to(10)
        assert {path.stem for path in (tmp_path / "samples").iterdir()} == {*names[:2], "mine"}


def test_warnings_are_recorded_with_the_preceding_step(tmp_path, capsys):
    with Tracker(quiet(), tmp_path) as tracker:
        tracker.warn("first\nof two lines")
        tracker.log(4, {"loss/total": 1.0})
        tracker.warn("second")
        tracker.back_to(2)
        tracker.warn("third")
    assert [(e["step"], e["message"]) for e in lines(tmp_path / EVENTS)] == [
        (0, "first\nof two lines"),
        (4, "second"),
        (2, "third"),  # a rollback removes no event
    ]
    assert "second" in capsys.readouterr().err


def test_torn_and_malformed_lines_are_skipped(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": "x"}\nnonsense\n{"no": 1}\n{"step": 2}\n{"step": 3}')
    assert kept_lines(path, 9) == ['{"step": 1}\n', '{"step": 2}\n']
    assert kept_lines(tmp_path / "none", 9) == []


def test_metrics_of_an_earlier_step_join_its_line_and_the_lines_stay_in_order(tmp_path):
    with Tracker(quiet(), tmp_path) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"loss/total": float(step)})
        tracker.log(2, {"eval/held/pass@1": 0.5})
        tracker.log(0, {"eval/held/pass@1": 0.25})
        tracker.log(3, {"eval/held/pass@1": 0.75})
        tracker.log(4, {"loss/total": 4.0})
        tracker.warn("now")
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "eval/held/pass@1": 0.25},
        {"step": 1, "loss/total": 1.0},
        {"step": 2, "loss/total": 2.0, "eval/held/pass@1": 0.5},
        {"step": 3, "loss/total": 3.0, "eval/held/pass@1": 0.75},
        {"step": 4, "loss/total": 4.0},
    ]
    with Tracker(quiet(), tmp_path, start=2) as tracker:
        tracker.log(1, {"eval/held/pass@1": 0.5})
        tracker.log(3, {"loss/total": 3.5})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert lines(tmp_path / EVENTS)[0]["step"] == 4
