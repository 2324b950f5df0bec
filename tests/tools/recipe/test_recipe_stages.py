"""The work of a stage with fake training: results of a finished run, and publication of models."""

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
        ([(0, 0.1), (4, 0.2), (6, None)], {}),  # step 4 of 6 is not the stage's final model
    ],
)
def test_the_result_of_a_run_is_measured_by_the_evaluation_of_its_last_step_alone(tmp_path, lines, after):
    written = [
        {"step": step, "time/step_s": 1.0} | ({} if rate is None else {"eval/add3/pass@1": rate})
        for step, rate in lines
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    (tmp_path / "DONE").write_text("6\n")
    result = run_grpo_stage(stage("grpo", tmp_path, steps=6), {}, quiet)
    assert result.before == {"eval/add3/pass@1": 0.1} and result.after == after


def test_a_training_stage_is_identified_by_the_stages_it_names_and_not_by_directories(tmp_path, monkeypatch):
    """It resumes after `output_dir` has moved."""
    identities = []

    def finish(config, *, identity):
        assert config.model.path == "runs/p/01_cold/model"
        identities.append(identity.model.path)
        (tmp_path / "metrics.jsonl").write_text("")

    monkeypatch.setattr("grpo_dist.runs.session.train", finish)
    moved = stage("grpo", tmp_path, model={"path": "runs/p/01_cold/model"})
    run_grpo_stage(replace(moved, symbolic=fakes.config(model={"path": "stage:cold"})), {}, quiet)
    assert identities == ["stage:cold"]


def test_a_model_gets_its_name_only_after_it_is_on_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("grpo_dist.runs.cold_start.base_model", lambda settings: tmp_path)
    monkeypatch.setattr("grpo_dist.runtime.files.os.fsync", lambda descriptor: synced.append(descriptor))
    monkeypatch.setattr(
        "grpo_dist.runs.cold_start.write_sft", lambda settings, base, out, say: (out / "w").write_text("1")
    )
    sft = {"model": "demo:tiny", "data": "demo:add3"}
    run_sft_stage(stage("sft", tmp_path, sft=sft), {}, quiet)
    assert (tmp_path / "model/w").is_file() and len(synced) == 3  # the file, its directory, the parent
