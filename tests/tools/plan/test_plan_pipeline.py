"""A plan of a whole pipeline: every stage with its memory and hours, and what does not fit."""

import json

import pytest
from rich.console import Console

from grpo_dist.cli import main
from grpo_dist.errors import UserError
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.pipeline import plan_pipeline, print_pipeline
from grpo_dist.tools.recipe.config import load_pipeline

RUN = {
    "model": {"path": "Qwen/Qwen2.5-7B", "gradient_checkpointing": True},
    "data": {"train": [{"path": "demo:add3"}], "max_prompt_tokens": 64},
    "batch": {"prompts_per_step": 16, "samples_per_prompt": 4, "micro_batch_tokens": 8192},
    "sampling": {"max_new_tokens": 256},
    "evaluation": {"before": False, "after": False},
    "policy": {"num_workers": 4, "zero_stage": 3},
    "rollout": {"num_workers": 4},
    "cluster": {"placement": "separate"},
    "bench": {"lengths": {"kind": "fixed", "tokens": 200, "mean": None}},
}


@pytest.fixture
def file(tmp_path):
    shown = tmp_path / "shown.jsonl"
    shown.write_text("".join(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n" for _ in range(320)))
    sft = {
        "model": "Qwen/Qwen2.5-7B",
        "data": [str(shown)],
        "epochs": 2,
        "batch_size": 64,
        "max_length": 1024,
    }
    made = RUN | {"sft": sft, "model": {"gradient_checkpointing": True}}
    model = {"model.path": "${stage:first}"}
    drawn = {"max_prompts": 600, "samples_per_prompt": 4, "chunk_prompts": 200, "keep_per_prompt": 2}
    stages = [
        {"name": "first", "kind": "sft", "settings": made},
        {"name": "learning", "kind": "grpo", "settings": RUN | {"steps": 50}, "overrides": model},
        {"name": "drawn", "kind": "sample", "settings": RUN | {"rejection": drawn}, "overrides": model},
        {
            "name": "small",
            "kind": "sft",
            "settings": made,
            "overrides": {"sft.model": "Qwen/Qwen2.5-1.5B", "sft.data": ["${stage:drawn}/sft.jsonl"]},
        },
    ]
    path = tmp_path / "pipeline.yaml"
    path.write_text(json.dumps({"name": "made", "stages": stages}))
    return path


def planned(path, *overrides, cluster="1x8xH100"):
    return plan_pipeline(load_pipeline(path, overrides), parse_cluster(cluster), prompt_tokens=50)


def test_every_stage_has_its_memory_and_its_hours(file):
    first, learning, drawn, small = planned(file).stages
    assert [*first.memory] == ["policy"] and [*drawn.memory] == ["rollout"]
    assert [*learning.memory] == ["policy", "rollout"]
    assert "10 steps of " in first.words  # twice 320 demonstrations, 64 at once
    assert "50 steps of " in learning.words and drawn.words == "600 prompts with 4 samples each"
    assert "38 steps of " in small.words  # two epochs of 1200 answers
    assert small.memory["policy"] < first.memory["policy"] / 2  # 1.5B, and 7B
    assert planned(file).seconds == pytest.approx(sum(s.seconds for s in (first, learning, drawn, small)))


def test_more_work_takes_longer_in_proportion(file):
    once, twice = planned(file), planned(file, "first.sft.epochs=4", "drawn.rejection.max_prompts=1200")
    assert twice.stages[0].seconds == pytest.approx(2 * once.stages[0].seconds)
    assert twice.stages[1].seconds == once.stages[1].seconds
    assert twice.stages[2].seconds == pytest.approx(2 * once.stages[2].seconds)


def test_lengths_are_those_of_the_rows_or_of_the_stage_that_makes_them(file):
    first, _, _, small = planned(file).stages
    assert any("half of `sft.max_length`" in note for note in first.assumed)  # there is no tokenizer
    assert not any("half of `sft.max_length`" in note for note in small.assumed)
    assert any("`drawn` keeps all that it may" in note for note in small.assumed)


def test_what_is_not_at_hand_is_assumed_and_printed(file):
    made = planned(file, "first.sft.data=[{path: elsewhere.jsonl}]")
    assert "10,000 demonstrations in elsewhere.jsonl, which cannot be read" in made.stages[0].assumed
    console = Console(record=True, width=200, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_pipeline(made, console)
    said = console.export_text()
    assert "stages on 1x8xH100" in said and "all stages: " in said and "GPU-hours, $" in said
    assert "assumed: 10,000 demonstrations in elsewhere.jsonl" in said


def test_generated_demonstrations_are_as_many_as_training_makes(file):
    made = planned(file, "first.sft.data=demo:add3", "first.sft.epochs=1").stages[0]
    assert "313 steps of " in made.words  # 20,000, 64 at once
    made = planned(file, "first.sft.data=demo:add3", "first.sft.epochs=1", "first.sft.examples=9600").stages[
        0
    ]
    assert "150 steps of " in made.words


def test_all_stages_that_do_not_fit_are_named_with_the_remedy(file):
    wrong = ["first.model={gradient_checkpointing: false, kernels: torch}"]
    wrong += ["small.sft.model=Qwen/Qwen2.5-72B"]
    with pytest.raises(UserError) as refused:
        planned(file, *wrong)
    said = str(refused.value)
    assert "stage `first`: supervised training: a policy rank needs " in said
    assert "stage `small`: supervised training: a policy rank needs " in said and "`drawn`" not in said


def test_the_command_plans_a_pipeline_and_refuses_options_of_a_run(file, capsys):
    assert main(["plan", str(file), "--cluster", "1x8xH100"]) == 0
    assert "learning" in capsys.readouterr().out
    assert main(["plan", str(file), "--cluster", "1x8xH100", "--sweep"]) == 2
    assert "--sweep: " in capsys.readouterr().err


def test_the_command_names_a_row_that_cannot_be_read_in_one_message(file, tmp_path, capsys):
    (tmp_path / "shown.jsonl").write_text('{"prompt": "1+1="}\n')
    overrides = ["first.sft.model=demo:tiny", "small.sft.model=demo:tiny"]
    assert main(["plan", str(file), "--cluster", "1x8xH100", *overrides]) == 2
    said = capsys.readouterr().err
    assert "shown.jsonl:1: `completion` is missing" in said and "Traceback" not in said


def sampled(path, data, **changes):
    """Write a pipeline of one sample stage of the rows in the file ``data``."""
    rejection = {"samples_per_prompt": 4, "chunk_prompts": 50}
    settings = RUN | {"rejection": rejection, "data": {"train": [{"path": str(data)}]}} | changes
    stages = [{"name": "drawn", "kind": "sample", "settings": settings}]
    path.write_text(json.dumps({"name": "made", "stages": stages}))
    return path


ROWS = [{"problem": f"{i} + 1 =", "answer": str(i + 1)} for i in range(200)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_are_counted_in_every_kind_of_file_and_bound_the_prompts(tmp_path, kind):
    import pandas  # of this test alone

    data = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        data.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind == "json":
        data.write_text(json.dumps(ROWS))
    else:
        pandas.DataFrame(ROWS).to_parquet(data)
    path = sampled(tmp_path / "pipeline.yaml", data)
    for most, prompts in (("null", 200), ("100000", 200), ("30", 30)):
        (drawn,) = planned(path, f"drawn.rejection.max_prompts={most}").stages
        assert drawn.words == f"{prompts} prompts with 4 samples each"


def test_a_file_that_cannot_be_read_is_named_with_its_stage(tmp_path):
    data = tmp_path / "rows.parquet"
    data.write_bytes(b"\xff\xfe no table")
    with pytest.raises(UserError, match=r"(?s)stage `drawn`: .*rows\.parquet"):
        planned(sampled(tmp_path / "pipeline.yaml", data))


def test_a_file_without_rows_is_named_with_its_stage(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("")
    with pytest.raises(UserError, match=r"(?s)stage `drawn`: .*rows\.jsonl: no rows"):
        planned(sampled(tmp_path / "pipeline.yaml", data), "drawn.rejection.max_prompts=30")


def test_a_sample_stage_has_all_gpus_for_its_engines(tmp_path):
    """Eight engines beside four policy ranks would need twelve."""
    path = sampled(tmp_path / "pipeline.yaml", "demo:add3", rollout={"num_workers": 8})
    (drawn,) = planned(path).stages
    assert [*drawn.memory] == ["rollout"]
