"""The work of a stage, without what it would start: what is taken from a finished run, how models appear."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.tools.recipe.config import ResolvedStage
from grpo_dist.tools.recipe.stages import run_grpo_stage, run_sft_stage
from tests.support import fakes


def quiet(message: str) -> None:
    """Ignore the message."""


def stage(kind, directory: Path, **changes) -> ResolvedStage:
    config = fakes.config(**changes)
    return ResolvedStage("it", kind, directory, config, config, ())


@pytest.mark.parametrize(
    ("lines", "after"),
    [
        ([(0, 0.1), (2, 0.2), (6, 0.3)], {"eval/add3/pass@1": 0.3}),
        ([(0, 0.1), (4, 0.2), (6, None)], {}),  # 4 of 6 steps: not the model that the stage ends with
    ],
)
def test_a_run_s_result_is_measured_by_the_evaluation_of_its_last_step_alone(tmp_path, lines, after):
    written = [
        {"step": step, "time/step_s": 1.0} | ({} if rate is None else {"eval/add3/pass@1": rate})
        for step, rate in lines
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    (tmp_path / "DONE").write_text("6\n")
    result = run_grpo_stage(stage("grpo", tmp_path, steps=6), {}, quiet)
    assert result.before == {"eval/add3/pass@1": 0.1} and result.after == after


def test_a_training_run_is_known_by_the_stages_it_names_not_by_their_directories(tmp_path, monkeypatch):
    """So that it resumes where `output_dir` has moved."""
    identities = []

    def finish(config, *, identity):
        assert config.model.path == "runs/p/01_cold/model"
        identities.append(identity.model.path)
        (tmp_path / "metrics.jsonl").write_text("")

    monkeypatch.setattr("grpo_dist.runs.session.train", finish)
    moved = stage("grpo", tmp_path, model={"path": "runs/p/01_cold/model"})
    run_grpo_stage(replace(moved, symbolic=fakes.config(model={"path": "stage:cold"})), {}, quiet)
    assert identities == ["stage:cold"]


def test_a_model_has_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("grpo_dist.runs.cold_start.base_model", lambda settings: tmp_path)
    monkeypatch.setattr("grpo_dist.runtime.files.os.fsync", lambda descriptor: synced.append(descriptor))
    monkeypatch.setattr(
        "grpo_dist.runs.cold_start.write_sft", lambda settings, base, out, say: (out / "w").write_text("1")
    )
    sft = {"model": "demo:tiny", "data": "demo:add3"}
    run_sft_stage(stage("sft", tmp_path, sft=sft), {}, quiet)
    assert (tmp_path / "model/w").is_file() and len(synced) == 3  # the file, its directory, the one above
