"""A run is one wandb run, however often it is interrupted."""

import sys

import pytest

from grpo_dist.observe import Tracker
from tests.support import fakes
from tests.support.wandb_file import history, offline_run


@pytest.mark.family("costly")
def test_a_resumed_or_rolled_back_run_stays_the_same_wandb_run(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = {"enabled": True, "mode": "offline"}
    config = fakes.config(tracking={"console": False, "tensorboard": False, "wandb": wandb})
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
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    command = ["grpo-dist", "train", "a.yaml", "steps=7", "judge.api_key=SESAME-OPEN"]
    monkeypatch.setattr(sys, "argv", command)
    wandb = {"enabled": True, "mode": "offline"}
    config = fakes.config(tracking={"console": False, "tensorboard": False, "wandb": wandb})
    with Tracker(config, tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert sys.argv == command
    offline_run(tmp_path / "wandb")  # everything is written
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert b"steps=7" in written and b"SESAME" not in written


def test_an_evaluation_that_ends_during_a_later_step_has_the_step_of_its_weights_at_wandb(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracking = {"console": False, "tensorboard": False, "wandb": {"enabled": True, "mode": "offline"}}
    config = fakes.config(
        tracking=tracking,
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
