"""A run's checkpoint as a model: which one a name resolves to, and that its weights equal the run's."""

import asyncio
import json
from dataclasses import asdict

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_dist.config import LoRAConfig, ModelConfig
from grpo_dist.config.files import dump_config
from grpo_dist.errors import UserError
from grpo_dist.runs.checkpoint import CheckpointState, write_manifest
from grpo_dist.runs.models import resolve_model
from grpo_dist.runs.run_weights import find_checkpoint, load_weights, pinned, restore_begun
from grpo_dist.tools.evaluate.target import configuration
from grpo_dist.tools.plan.models import model_of
from tests.support import fakes, made_groups
from tests.support.made_weights import write_run
from tests.support.real_ranks import running


def quiet(message):
    """Drop the message."""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with checkpoints of steps 2 and 4, both without a policy."""
    monkeypatch.chdir(tmp_path)
    for step in (2, 4):
        checkpoint = tmp_path / f"runs/mine/checkpoints/step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        write_manifest(checkpoint)
    text = "model: {path: 'demo:tiny'}\ndata: {train: [{path: 'demo:add3'}], instruction: Add.}\n"
    (tmp_path / "runs/mine/config.yaml").write_text(text)
    return tmp_path / "runs/mine"


def test_a_name_means_the_newest_whole_checkpoint_or_that_of_a_step(run):
    assert find_checkpoint("runs/mine@latest", quiet).name == "step_000004"
    assert find_checkpoint("runs/mine@2", quiet).name == "step_000002"
    (run / "checkpoints/step_000004/state.json").write_text("damaged")
    assert find_checkpoint(f"{run}@latest", quiet).name == "step_000002"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("runs/mine@3", ["runs/mine@3: no such checkpoint", "it has 2, 4"]),
        ("runs/none@latest", ["runs/none@latest: no such checkpoint", "it has none"]),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused_with_the_ones_that_are(run, path, words):
    with pytest.raises(ValueError) as refusal:
        resolve_model(ModelConfig(path=path), None, 0, quiet)
    assert all(word in str(refusal.value) for word in words)


def test_an_evaluation_of_a_checkpoint_has_the_settings_of_its_run(run):
    config = configuration("runs/mine@latest", ["demo:add4"], [])
    assert config.model.path == "runs/mine@latest" and config.data.instruction == "Add."
    with pytest.raises(UserError, match=r"runs/none@2: no run in runs/none"):
        configuration("runs/none@2", ["demo:add4"], [])


@pytest.mark.parametrize("path", ["runs/mine@latest", "{run}@2", "runs/mine/model", "runs/mine/export/4"])
def test_weights_that_contain_an_adapter_are_not_merged_with_it_again(run, tmp_path, path):
    (run / "config.yaml").write_text("model: {path: 'demo:tiny', adapter: tuned}\n")
    for export in ("model", "export/4"):
        (run / export).mkdir(parents=True)
        (run / export / ".export.json").write_text("{}")
    words = r"model.adapter = \./tuned: model.path = .* contains it, .*runs/mine began with it; set model.ad"
    with pytest.raises(ValueError, match=words):
        resolve_model(ModelConfig(path=path.format(run=run), adapter="./tuned"), None, 0, quiet)
    with pytest.raises(ValueError, match="no such checkpoint"):  # another adapter is no reason
        resolve_model(ModelConfig(path="runs/mine@3", adapter="other"), None, 0, quiet)


def test_a_resumed_run_begins_with_what_it_began_with_and_says_so(run, tmp_path):
    config = fakes.config(model={"path": "runs/mine@latest"})
    new, messages = tmp_path / "runs/new", []
    new.mkdir()
    old = {"model": {"path": "runs/mine@2"}, "rewards": {"timeout_s": 5.0}}
    (new / "config.yaml").write_text(yaml.safe_dump(old))
    restored = restore_begun(config, new, messages.append)
    assert restored.model.path == "runs/mine@2"
    (note,) = messages
    assert "note: model.path = runs/mine@2: this run reads that checkpoint again when it resumes" in note
    assert "grpo-dist export runs/mine@2" in note
    restore_begun(config, tmp_path / "runs/other", messages.append)
    assert len(messages) == 2


def test_a_run_keeps_the_checkpoint_that_it_began_with(run, tmp_path):
    config = fakes.config(model={"path": "runs/mine@latest"})
    new = tmp_path / "runs/new"
    assert pinned(config, new).model.path == "runs/mine@4"
    new.mkdir()
    (new / "config.yaml").write_text("model: {path: 'runs/mine@2'}\n")
    assert pinned(config, new).model.path == "runs/mine@2"
    (new / "config.yaml").write_text("model: {path: 'runs/other@2'}\n")
    assert pinned(config, new).model.path == "runs/mine@4"
    assert pinned(fakes.config(), new) == fakes.config()
    assert pinned(config).model.path == "runs/mine@4"  # a user-written loop has no directory


def test_teachers_are_pinned_too(run, tmp_path):
    teachers = [{"name": "a", "model": "runs/mine@latest"}, {"name": "b", "model": "demo:tiny"}]
    config = fakes.config(distillation={"teachers": teachers})
    assert [t.model for t in pinned(config).distillation.teachers] == ["runs/mine@4", "demo:tiny"]
    (tmp_path / "config.yaml").write_text("distillation: {teachers: [{name: a, model: 'runs/mine@2'}]}\n")
    assert pinned(config, tmp_path).distillation.teachers[0].model == "runs/mine@2"


def test_a_plan_of_a_checkpoint_has_the_sizes_of_the_model_that_its_run_began_with(run):
    (run / "checkpoints/step_000002/config.yaml").write_text(dump_config(fakes.config()))
    write_manifest(run / "checkpoints/step_000002")
    planned = model_of(ModelConfig(path="runs/mine@2"), None, 0)
    assert planned.parameters == model_of(ModelConfig(path="demo:tiny"), None, 0).parameters
    with pytest.raises(UserError, match="no such checkpoint"):
        model_of(ModelConfig(path="runs/mine@3"), None, 0)


def test_the_model_has_the_weights_of_the_checkpoint(tiny_model, tmp_path, monkeypatch):
    """With ZeRO stage 0, whose file has every parameter under its DeepSpeed name."""
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    config = fakes.config(model={"path": str(tiny_model), "dtype": "float32"})
    trained = write_run(tmp_path / "run", config, tiny_model).state_dict()
    directory = resolve_model(ModelConfig(path=f"{tmp_path / 'run'}@latest"), None, 0, quiet)
    written = load_file(directory / "model.safetensors")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in written.items())
    tokens = (directory / "tokenizer.json").read_bytes()
    assert tokens == (tiny_model / "tokenizer.json").read_bytes()


def test_adapters_go_on_no_other_base_than_that_of_their_run(run, tmp_path):
    state = CheckpointState(4, "", "", models={"model.path": "0123"})
    checkpoint = run / "checkpoints/step_000004"
    (checkpoint / "state.json").write_text(json.dumps(asdict(state)))
    config = fakes.config(policy={"lora": {"rank": 4}}, model={"path": "owner/name"})
    with pytest.raises(ValueError, match=r"step_000004: `model\.path` = owner/name has other weights"):
        load_weights(config, tmp_path, checkpoint)


def exported(checkpoint, config):
    """Complete a ``checkpoint`` of ``config``, and return the directory of its model."""
    (checkpoint / "config.yaml").write_text(dump_config(config))
    (checkpoint / "state.json").write_text(json.dumps(asdict(CheckpointState(1, "", ""))))
    write_manifest(checkpoint)
    return resolve_model(ModelConfig(path=f"{checkpoint.parents[1]}@latest"), None, 0, quiet)


@pytest.mark.machine
@pytest.mark.slow
@pytest.mark.parametrize("layout", [
    {"ranks": 1, "stage": 0}, {"ranks": 2, "stage": 3}, {"ranks": 2, "stage": 1, "lora": LoRAConfig(rank=4)},
])  # fmt: skip
def test_the_weights_are_bit_by_bit_those_that_the_run_exports(
    forked_ranks, tiny_model, tmp_path, monkeypatch, layout
):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    checkpoint = tmp_path / "run/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)

    async def trained():
        async with running(tiny_model, **layout) as group:
            await group.update(group.stage([made_groups.batch(seed=1)]))
            await group.save(checkpoint / "policy")
            await group.export(tmp_path / "exported", tokenizer_dir=tiny_model)

    asyncio.run(trained())
    config = fakes.config(
        model={"path": str(tiny_model), "dtype": "float32"}, policy={"lora": layout.get("lora")}
    )
    directory = exported(checkpoint, config)
    files = ["model.safetensors"] + (["adapter/adapter_model.safetensors"] if "lora" in layout else [])
    before = load_file(tiny_model / "model.safetensors")
    for file in files:
        actual, expected = load_file(directory / file), load_file(tmp_path / "exported" / file)
        assert actual.keys() == expected.keys() and all(torch.equal(actual[n], expected[n]) for n in expected)
        assert any(n not in before or not torch.equal(before[n], t) for n, t in actual.items())
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen2"
