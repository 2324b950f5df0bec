"""The work of a stage with fake training: results of a finished run, and publication of models."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_dist.tools.recipe.config import ResolvedStage
from grpo_dist.tools.recipe.record import StageRecord, begin, comparable
from grpo_dist.tools.recipe.run import known_measures, run_grpo_stage, run_sft_stage
from tests.support import fakes


def quiet(message: str) -> None:
    """Ignore the message."""


def stage(kind, directory: Path, **changes) -> ResolvedStage:
    config = fakes.config(**changes)
    return ResolvedStage("it", kind, directory, config, config, ())


@pytest.mark.parametrize(("steps", "lines", "after"), [
    (6, [(0, 0.1), (2, 0.2), (6, 0.3)], {"eval/add3/pass@1": 0.3}),
    (6, [(0, 0.1), (4, 0.2), (6, None)], {}),  # step 4 of 6 is not the stage's final model
    (9, [(0, 0.1), (4, 0.2), (6, 0.3)], {"eval/add3/pass@1": 0.3}),  # `checkpoint.target` has ended it
])  # fmt: skip
def test_the_result_of_a_run_is_measured_by_the_evaluation_of_its_last_step_alone(
    tmp_path, monkeypatch, steps, lines, after
):
    rows = [
        {"step": step, "time/step_s": 1.0} | ({} if rate is None else {"eval/add3/pass@1": rate})
        for step, rate in lines
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    (tmp_path / "DONE").write_text("6\n")
    monkeypatch.setattr("grpo_dist.tools.recipe.run.train", lambda config, *, identity: None)
    result = run_grpo_stage(stage("grpo", tmp_path, steps=steps), {}, quiet)
    assert result.before == {"eval/add3/pass@1": 0.1} and result.after == after


def test_a_stage_that_its_best_evaluation_has_ended_does_not_train_again(tmp_path, monkeypatch):
    """`train` would refuse it as complete."""
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "DONE").write_text("6\n")
    monkeypatch.setattr("grpo_dist.tools.recipe.run.why_ended_early", lambda config, directory: "target")
    monkeypatch.setattr("grpo_dist.tools.recipe.run.train", lambda config, *, identity: pytest.fail("trains"))
    run_grpo_stage(stage("grpo", tmp_path, steps=9), {}, quiet)


def test_a_training_stage_is_identified_by_the_stages_it_names_and_not_by_directories(tmp_path, monkeypatch):
    """So it resumes after `output_dir` has moved."""
    identities = []

    def finish(config, *, identity):
        assert config.model.path == "runs/p/01_cold/model"
        identities.append(identity.model.path)
        (tmp_path / "metrics.jsonl").write_text("")

    monkeypatch.setattr("grpo_dist.tools.recipe.run.train", finish)
    moved = stage("grpo", tmp_path, model={"path": "runs/p/01_cold/model"})
    run_grpo_stage(replace(moved, symbolic=fakes.config(model={"path": "stage:cold"})), {}, quiet)
    assert identities == ["stage:cold"]


def test_rewards_of_a_held_out_set_belong_to_the_result_of_a_stage_alone(tmp_path):
    data = {"train": [{"path": "demo:add3"}], "eval": [{"path": "demo:add4"}]}
    held = stage("grpo", tmp_path, data=data, rewards={"by_source": {"add4": {"functions": ["exact"]}}})
    record, key = begin(held, {}), "rewards.by_source.add4.functions.0.function"
    assert comparable(record, held, "complete").settings[key] == "exact"
    assert key not in comparable(record, held, "started").settings


@pytest.mark.parametrize(("changed", "is_known"), [
    ({}, True),
    ({"environments": {"num_workers": 3}}, True),
    ({"environments": {"max_turns": 3}}, False),
    ({"environments": {"max_tool_tokens": 64}}, False),
    ({"sampling": {"max_new_tokens": 8, "stop": ["\n"]}}, False),
    ({"sampling": {"max_new_tokens": 9}}, False),
])  # fmt: skip
def test_an_evaluation_by_an_earlier_stage_is_used_only_where_its_samples_would_be_the_same(
    tmp_path, changed, is_known
):
    same = {"model": {"path": "stage:cold"}, "sampling": {"max_new_tokens": 8}}
    settings = stage("sft", tmp_path, **same).symbolic.model_dump(mode="json")
    earlier = StageRecord("cold", "sft", settings, {}, "complete", after={"eval/add3/pass@1": 0.5})
    measures = known_measures(stage("grpo", tmp_path, **(same | changed)), {"cold": earlier})
    assert measures == (earlier.after if is_known else {})


def test_supervised_training_is_identified_by_the_stages_it_names(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "grpo_dist.tools.recipe.run.train", lambda config, *, identity: calls.append((config, identity))
    )
    data = [{"path": "demo:add3", "examples": 20}]
    sft = {"model": "runs/p/01_cold/model", "data": data, "batch_size": 8, "epochs": 3}
    moved = stage("sft", tmp_path, model={"path": "sft"}, sft=sft)
    symbolic = fakes.config(model={"path": "sft"}, sft=sft | {"model": "stage:cold"})
    run_sft_stage(replace(moved, symbolic=symbolic), {}, quiet)
    ((config, identity),) = calls
    assert config.is_supervised and identity.is_supervised
    assert (config.sft.model, identity.sft.model) == ("runs/p/01_cold/model", "stage:cold")
    assert config.steps == identity.steps == 8  # 60 rows in batches of 8, the last one smaller


def test_finished_supervised_training_is_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_dist.tools.recipe.run.train", None)
    (tmp_path / "DONE").write_text("7\n")
    sft = {"model": "demo:tiny", "data": "demo:add3"}
    run_sft_stage(stage("sft", tmp_path, model={"path": "sft"}, sft=sft), {}, quiet)
