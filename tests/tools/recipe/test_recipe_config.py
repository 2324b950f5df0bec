"""Pipeline files: how stages are resolved, and refusals before anything starts."""

import pytest
from omegaconf import OmegaConf

from grpo_dist.config.files import ConfigError
from grpo_dist.runs.run_directory import choose_run_dir
from grpo_dist.tools.recipe.config import load_pipeline

BASE = {
    "name": "base",
    "seed": 3,
    "model": {"path": "demo:tiny"},
    "data": {"train": [{"path": "demo:add3", "max_rows": 8}]},
    "sft": {"model": "demo:tiny", "data": "demo:add3", "steps": 7, "seed": "${seed}"},
}
STAGES = [
    {"name": "cold_start", "kind": "sft", "config": "../base.yaml"},
    {"name": "reason", "kind": "grpo", "config": "../base.yaml",
     "overrides": {"model.path": "${stage:cold_start}", "steps": 2}},
    {"name": "reject", "kind": "sample", "config": "../base.yaml",
     "settings": {"model": {"path": "${stage:reason}"}, "rejection": {"samples_per_prompt": 2}}},
    {"name": "again", "kind": "sft", "config": "../base.yaml", "overrides": {
        "sft.model": "${stage:cold_start}",
        "sft.data": ["${stage:reject}/sft.jsonl", {"path": "demo:add3", "examples": 5}]}},
]  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(BASE)))
    (tmp_path / "pipelines").mkdir()

    def write_pipeline(stages=STAGES, **changes):
        path = tmp_path / "pipelines/p.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create({"name": "p", "stages": stages} | changes)))
        return path

    return write_pipeline


def changed(index, **changes):
    return [stage | changes if i == index else stage for i, stage in enumerate(STAGES)]


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as error:
        load_pipeline(path, overrides)
    return str(error.value)


def test_stages_are_ordinary_configurations_that_name_the_results_of_earlier_ones(write):
    pipeline = load_pipeline(write())
    names = ("01_cold_start", "02_reason", "03_reject", "04_again")
    assert [str(s.directory) for s in pipeline.stages] == [f"runs/p/{name}" for name in names]
    cold_start, reason, reject, again = (stage.config for stage in pipeline.stages)
    assert cold_start.model.path == "sft" and cold_start.sft.steps == 7
    assert reason.model.path == "runs/p/01_cold_start/model" and reason.steps == 2
    assert (reason.output_dir, reason.name) == ("runs/p", "02_reason")
    assert reject.model.path == "runs/p/02_reason/model" and reject.rejection.samples_per_prompt == 2
    assert again.sft.model == "runs/p/01_cold_start/model"
    assert [s.path for s in again.sft.data] == ["runs/p/03_reject/sft.jsonl", "demo:add3"]
    assert pipeline["again"].inputs == ("cold_start", "reject")
    assert pipeline["again"].symbolic.sft.model == "stage:cold_start"
    assert {config.seed for config in (cold_start, reason, reject, again)} == {3}


def test_a_supervised_stage_keeps_how_the_model_is_computed_and_not_which_one(write):
    path = write()
    model = {"path": "demo:tiny", "revision": "main", "dtype": "bfloat16", "gradient_checkpointing": True}
    base = OmegaConf.create(BASE | {"model": model})
    (path.parents[1] / "base.yaml").write_text(OmegaConf.to_yaml(base))
    model_config = load_pipeline(path)["cold_start"].config.model
    assert (model_config.path, model_config.revision) == ("sft", None)
    assert (model_config.dtype, model_config.gradient_checkpointing) == ("bfloat16", True)


def test_an_adapter_is_merged_into_its_base_alone(write):
    """Not into the model of a stage that began with it, also with supervised training in between."""
    tuned = {"kind": "grpo", "config": "../base.yaml", "overrides": {"model.adapter": "tuned"}}
    sft = {"name": "tune", "kind": "sft", "config": "../base.yaml",
           "overrides": {"sft.model": "${stage:first}", "sft.seed": 3}}  # fmt: skip
    for middle, start in (([], "first"), ([sft], "tune")):
        last = tuned | {"settings": {"model": {"path": f"${{stage:{start}}}"}}}
        path = write([tuned | {"name": "first"}, *middle, last | {"name": "last"}])
        message = refusal(path)
        assert f"`last`: `model.adapter` = tuned: `model.path` = ${{stage:{start}}} contains it" in message
        assert "stage `first` began with it; set model.adapter to null" in message
        other = load_pipeline(path, ["last.model.adapter=other"])["last"].config
        assert other.model.adapter == "other"


def test_a_pipeline_as_the_configuration_of_a_stage_is_refused(write):
    path = write()
    assert "p.yaml: a pipeline; expected the configuration" in refusal(write(changed(1, config=path.name)))


def test_one_seed_is_for_all_stages_and_the_command_line_overrides_settings(write):
    path = write(seed=5)
    pipeline = load_pipeline(path, ["output_dir=out", "reason.steps=9", "again.sft.seed=1"])
    assert str(pipeline.directory) == "out/p"
    assert [(s.config.seed, s.config.sft.seed) for s in pipeline.stages] == [(5, 5), (5, 5), (5, 5), (5, 1)]
    assert pipeline["reason"].config.steps == 9
    assert load_pipeline(path, ["seed=6"])["reject"].config.seed == 6


def test_supervised_training_also_uses_the_seed_of_the_pipeline(write):
    section = {"model": "demo:tiny", "data": "demo:add3", "seed": 3}
    stages = [
        {"name": "a", "kind": "sft", "config": "../base.yaml", "settings": {"sft": {"steps": 1}}},
        {"name": "b", "kind": "sft", "config": "../base.yaml", "overrides": {"sft": section}},
        {"name": "c", "kind": "grpo", "config": "../bare.yaml"},
        {"name": "d", "kind": "sft", "config": "../bare.yaml", "settings": {"sft": section | {"seed": 4}}},
        {"name": "e", "kind": "sft", "config": "../written.yaml"},
    ]
    path = write(stages, seed=5)
    for name, sft in (("bare", {}), ("written", {"sft": section})):
        rest = {key: value for key, value in BASE.items() if key != "sft"}
        (path.parents[1] / f"{name}.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(rest | sft)))
    a, b, c, d, e = (stage.config.sft for stage in load_pipeline(path).stages)
    assert (a.seed, b.seed, c, d.seed, e.seed) == (5, 3, None, 4, 5)


@pytest.mark.parametrize(
    ("base", "settings", "expected"),
    [
        ({"name": "gspo", "clip_low": 3e-4}, {"name": "ppo_clip"}, ("ppo_clip", 0.2)),
        ({"name": "gspo", "clip_low": 3e-4}, {"clip_high": 0.1}, ("gspo", 3e-4)),
        ("gspo", {"clip_low": 0.1}, ("gspo", 0.1)),
        ({"name": "gspo", "clip_low": 3e-4}, "ppo_clip", ("ppo_clip", 0.2)),
    ],
)
def test_settings_of_a_stage_replace_a_section_that_has_another_name(write, base, settings, expected):
    """As on the command line: the numbers of a replaced loss are not those of the new one."""
    stage = {
        "name": "a",
        "kind": "grpo",
        "config": "../base.yaml",
        "settings": {"algorithm": {"loss": settings}},
    }
    path = write([stage])
    (path.parents[1] / "base.yaml").write_text(
        OmegaConf.to_yaml(OmegaConf.create(BASE | {"algorithm": {"loss": base}}))
    )
    loss = load_pipeline(path)["a"].config.algorithm.loss
    assert (loss.name, loss.clip_low) == expected


def test_a_stage_is_looked_for_where_its_run_writes(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    stage = load_pipeline(write(output_dir="~/runs")).stages[1]
    run_dir = choose_run_dir(stage.config.checkpoint, stage.config.name, stage.config.output_dir)
    assert stage.directory == run_dir == tmp_path / "home/runs/p/02_reason"


@pytest.mark.parametrize(("overrides", "words"), [
    ({"model.path": "${stage:cold}"}, ["no such stage", "${stage:cold}", "earlier ones: cold_start"]),
    ({"model.path": "${stage:reject}"}, ["${stage:reject}", "comes after", "move `reject` before `reason`"]),
    ({"model.path": "${stage:reason}"}, ["refers to itself"]),
    ({"model.path": "${stage:cold_start}/model"}, ["`model.path`", "${stage:NAME} alone"]),
    ({"data.train": [{"path": "${stage:cold_start}/sft.jsonl"}]}, ["`data.train.0.path`", "sample stage"]),
    ({"stepz": 3}, ["unknown key `stepz`", "did you mean `steps`"]),
    ({"steps": -1}, ["`steps` = -1", "greater than 0"]),
    ({"name": "mine"}, ["`name` = 'mine'", "remove the key"]),
    ({"checkpoint.resume": "never"}, ["`checkpoint.resume`", "--from"]),
    ({"checkpoint.export": False}, ["`checkpoint.export` = false", "set it to true"]),
    ({"data": 3}, ["stage `reason`", "data"]),
    ({"rewards.models": [{"name": "q", "path": "${stage:cold_start}"}]},
     ["`rewards.models.0.path` = ${stage:cold_start}", "a reward model is a classifier"]),
    ({"model.path": "stage:cold_start"}, ["'stage:cold_start'", "write ${stage:cold_start}"]),
    ({"data.train.0.path": "stage:x/sft.jsonl"}, ["write ${stage:x}/sft.jsonl"]),
    ({"sft.data": [{"path": "a.jsonl", "noise": 0.1}]},
     ["`sft.data.0`", "noise = 0.1", "path = a.jsonl", "remove it"]),
    ({"rejection.keep_per_prompt": 3, "rejection.samples_per_prompt": 2},
     ["`rejection`: keep_per_prompt = 3 is above samples_per_prompt = 2"]),
])  # fmt: skip
def test_an_invalid_stage_is_refused_by_name(write, overrides, words):
    message = refusal(write(changed(1, overrides=overrides)))
    assert "p.yaml: stage `reason`" in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("index", "changes", "words"), [
    (0, {"overrides": {"sft": None}}, ["needs an `sft` section"]),
    (0, {"overrides": {"checkpoint.export": False}}, ["an sft stage", "set it to true"]),
    (0, {"overrides": {"model.path": "demo:tiny"}}, ["`model.path` = demo:tiny", "`sft.model`"]),
    (3, {"overrides": {"sft.model": "${stage:reject}"}}, ["`sft.model`", "`reject` is a sample stage"]),
    (3, {"overrides": {"sft.data": "${stage:reject}"}}, ["`sft.data.0.path`", "${stage:NAME}/sft.jsonl"]),
    (2, {"overrides": {"rewards.shuffle": True}}, ["`rewards.shuffle` = true", "sample stage"]),
    (2, {"config": "../none.yaml"}, ["none.yaml: no such configuration file"]),
    (2, {"kind": "rl"}, ["`stages.2.kind` = 'rl'", "'sft', 'grpo' or 'sample'"]),
    (2, {"settings": {"data": {"train": {"a": 1}}}}, ["stage `reject`: settings: Cannot merge"]),
    (2, {"name": "reason"}, ["two stages are called `reason`"]),
    (2, {"name": "seed"}, ["a stage cannot be called `seed`"]),
    (2, {"name": "a/b"}, ["`stages.2.name` = 'a/b'"]),
    (2, {"overides": {}}, ["unknown key `stages.2.overides`", "did you mean `stages.2.overrides`?"]),
])  # fmt: skip
def test_an_invalid_pipeline_is_refused(write, index, changes, words):
    message = refusal(write(changed(index, **changes)))
    assert all(word in message for word in words), message


def test_no_stages_and_unknown_overrides_are_refused(write):
    assert "`stages`" in refusal(write(stages=[]))
    path = write()
    for text in ("steps=3", "nobody.steps=3", "reason=3"):
        assert "STAGE.key=value" in refusal(path, text)
    path.write_text("name: p\n")
    assert "`stages` is missing" in refusal(path)
