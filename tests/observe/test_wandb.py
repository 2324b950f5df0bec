"""A run is one wandb run, however often it is interrupted."""

import sys

import pytest
import wandb

from grpo_dist.observe import trackers
from grpo_dist.observe.completions import Table
from grpo_dist.observe.tracker import Tracker
from grpo_dist.observe.trackers import ShownConfig, WandbRun
from tests.support import fakes
from tests.support.patience import HANG_S
from tests.support.services import history, offline_run

TRACKING = {"console": False, "tensorboard": False, "wandb": "w"}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for limit in ("_INIT_S", "_FINISH_S", "_CLOSE_S"):  # a busy machine needs minutes to open wandb
        monkeypatch.setattr(trackers, limit, HANG_S)


@pytest.mark.slow
def test_a_resumed_or_rolled_back_run_stays_the_same_wandb_run(tmp_path):
    config = fakes.config(tracking=TRACKING)
    with Tracker(config, tmp_path) as first:
        first.log(1, {"reward/mean": 0.5})
    with Tracker(config, tmp_path, start=1, wandb_id=first.wandb_id) as second:
        second.log(2, {"reward/mean": 0.6})
        second.back_to(1)
        second.log(2, {"reward/mean": 0.6})
    assert first.wandb_id and second.wandb_id == first.wandb_id
    parts = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(parts) == 3 and all(f"-{first.wandb_id}" in part for part in parts)


def test_no_secret_of_the_command_line_reaches_wandb(tmp_path, monkeypatch):
    command = ["grpo-dist", "train", "a.yaml", "steps=7", "judge.api_key=SESAME-OPEN"]
    monkeypatch.setattr(sys, "argv", command)
    config = fakes.config(tracking=TRACKING)
    with Tracker(config, tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert sys.argv == command
    offline_run(tmp_path / "wandb")  # everything is written
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert b"steps=7" in written and b"SESAME" not in written


@pytest.mark.slow
def test_an_evaluation_that_ends_during_a_later_step_has_the_step_of_its_weights_at_wandb(tmp_path):
    config = fakes.config(
        tracking=TRACKING,
        data={"train": [{"path": "demo:add3"}], "eval": [{"path": "demo:add3", "split": "test"}]},
        evaluation={"num_workers": 1, "every": 1, "after": False},
    )
    with Tracker(config, tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        tracker.log(2, {"reward/mean": 0.6})
        tracker.log(1, {"eval/held/pass@1": 0.25})
    rows = history(offline_run(tmp_path / "wandb"))
    (row,) = [row for row in rows if "eval/held/pass@1" in row]
    assert (row["eval/held/pass@1"], row["eval/step"]) == (0.25, 1.0)


class ResumedRun:
    """A wandb run with steps up to 20. Like the wandb server, it drops records of steps before the current
    one.
    """

    def __init__(self):
        self.starting_step = self.current = 21
        self.x_axes, self.rows = {}, {}

    def define_metric(self, name, *, step_metric):
        self.x_axes[name] = step_metric

    def log(self, metrics, *, step):
        if step >= self.current:
            self.current = step
            self.rows.setdefault(step, {}).update(metrics)


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """Return a tracker that resumes a wandb run, and that run."""
    run = ResumedRun()
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    monkeypatch.setattr(wandb, "Table", lambda columns, data: data)
    return WandbRun("w", ShownConfig.from_config(fakes.config()), tmp_path, "id", warn=print), run


def test_an_evaluation_of_the_step_that_a_run_resumes_at_arrives(resumed):
    tracker, run = resumed
    tracker.table(20, Table("completions/held", ((1,),)))
    tracker.log(20, {"eval/held/pass@1": 0.5, "time/evaluation_s": 3.0})
    tracker.log(21, {"reward/mean": 0.25})
    expected = {"eval/held/pass@1": 0.5, "eval/step": 20.0, "time/evaluation_s": 3.0, "reward/mean": 0.25}
    assert run.rows == {21: expected | {"completions/held": [[1]]}}
    assert run.x_axes == {"eval/*": "eval/step", "validation/*": "eval/step"}


def test_a_validation_of_the_step_that_a_run_resumes_at_arrives(resumed):
    tracker, run = resumed
    tracker.log(20, {"validation/loss": 1.5})
    assert run.rows == {21: {"validation/loss": 1.5, "eval/step": 20.0}}


def test_repeated_steps_do_not_replace_the_first_new_one(resumed):
    """The run resumes at 18, and repeats its evaluation of that step while 19 is trained."""
    tracker, run = resumed
    for step in range(19, 24):
        tracker.log(step, {"reward/mean": step / 100})
        if step == 19:
            tracker.log(18, {"eval/held/pass@1": 0.5})
            tracker.table(19, Table("completions", ()))
    assert {step: row["reward/mean"] for step, row in run.rows.items()} == {21: 0.21, 22: 0.22, 23: 0.23}
    assert run.rows[21]["eval/step"] == 18.0 and "completions" not in run.rows[21]
