"""Exports of models whose generation config transformers refuses to save; files that an export replaces."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_dist.config import LoRAConfig, PolicyConfig
from grpo_dist.policy.full_weights import FullWeights, why_no_export, write_model
from grpo_dist.policy.lora import add_adapters
from grpo_dist.runs.models import set_chat_template


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("generation_config.json", {"temperature": 0.6, "top_p": 0.95}),
        ("generation_config.json", {"pad_token_id": -1}),
        ("generation_config.json", {"num_beams": 1, "length_penalty": 2.0}),
        ("config.json", {"temperature": 0.7}),
    ],
)
def test_a_generation_config_that_transformers_refuses_to_save_is_exported_as_it_is(
    tiny_model, tmp_path, file, settings
):
    start, out = tmp_path / "start", tmp_path / "out"
    shutil.copytree(tiny_model, start)
    before = json.loads((start / file).read_text()) if (start / file).is_file() else {}
    (start / "generation_config.json").unlink()  # it would take precedence over config.json
    (start / file).write_text(json.dumps(before | settings))
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with pytest.raises(ValueError, match="invalid"):
        model.generation_config.save_pretrained(tmp_path / "refused")
    generation = model.generation_config
    write_model(model, model.state_dict(), {}, out, str(start), trust_remote_code=False)
    assert model.generation_config is generation
    assert settings.items() <= json.loads((out / "generation_config.json").read_text()).items()
    assert GenerationConfig.from_pretrained(out).to_dict() == generation.to_dict()
    assert load_file(out / "model.safetensors").keys() == load_file(start / "model.safetensors").keys()


def test_an_export_names_the_end_token_of_training_samples(tiny_model, tmp_path):
    """Else an engine that serves a base model with a chat template would not stop after the answer."""
    start, out = tmp_path / "start", tmp_path / "out"
    shutil.copytree(tiny_model, start)
    end = AutoTokenizer.from_pretrained(start).convert_tokens_to_ids("<|end|>")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((start / name).read_text())
        (start / name).write_text(json.dumps(settings | {"eos_token_id": 2}))
    assert end != 2
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    write_model(model, model.state_dict(), {}, out, str(start), trust_remote_code=False)
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, end]


def test_an_export_is_recognised_as_one_also_with_an_adapter(tiny_model, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert why_no_export(out) == ""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    settings = LoRAConfig(rank=2, target_modules=("q_proj",))
    add_adapters(model, settings, seed=0)
    weights = FullWeights(model, PolicyConfig(lora=settings, zero_stage=0))
    whole, low_rank = (
        {n: t.clone() for bucket in weights.buckets(1 << 20, **how) for n, t in bucket}
        for how in ({"as_held": True}, {"adapters_only": True})
    )
    downloaded = tmp_path / "models--me--tiny/snapshots/1cfa"
    downloaded.parent.mkdir(parents=True)
    downloaded.symlink_to(tiny_model)
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    templated = set_chat_template(downloaded, "{{ messages[0]['content'] }}")
    for base, name in ((tiny_model, str(tiny_model)), (downloaded, "me/tiny"), (templated, "me/tiny")):
        write_model(model, whole, low_rank, out, str(base), trust_remote_code=False)
        assert (out / "adapter" / "adapter_model.safetensors").is_file() and why_no_export(out) == ""
        settings = json.loads((out / "adapter/adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == name


class CustomTokenizer:
    """Saves files with unusual names."""

    def save_pretrained(self, directory):
        (directory / "pieces").mkdir()
        for name in ("ranks.bin", "pieces/common.txt"):
            (directory / name).write_text("1")


@pytest.fixture
def exported(tiny_model, tmp_path, monkeypatch):
    """Return a function that exports a model with a `CustomTokenizer`, and the directory."""
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: CustomTokenizer())
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def export():
        write_model(model, model.state_dict(), {}, tmp_path / "out", str(tiny_model), trust_remote_code=True)

    export()
    return export, tmp_path / "out"


def test_an_export_may_be_repeated_whatever_files_its_tokenizer_saves(exported):
    export, out = exported
    for _ in range(2):
        assert (out / "pieces/common.txt").is_file() and why_no_export(out) == ""
        export()
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("added", ["notes.txt", "pieces/mine.txt", "other.safetensors"])
def test_an_export_with_a_file_that_was_added_is_not_replaced(exported, added):
    _, out = exported
    (out / added).write_text("kept")
    assert why_no_export(out) == f"no export wrote its {added}"


def test_an_export_with_a_link_instead_of_a_file_is_not_replaced(exported, tmp_path):
    _, out = exported
    (out / "ranks.bin").rename(tmp_path / "moved.bin")
    (out / "ranks.bin").symlink_to(tmp_path / "moved.bin")
    assert why_no_export(out) == "no export wrote its ranks.bin"


@pytest.mark.parametrize("listed", [None, "{", "[]", "3", '{"files": 3}', '{"files": [3]}'])
def test_an_export_without_a_readable_file_list_is_not_replaced(exported, listed):
    _, out = exported
    (out / ".export.json").unlink()
    if listed is not None:
        (out / ".export.json").write_text(listed)
    assert why_no_export(out) == f"no export wrote its {'config.json' if listed is None else '.export.json'}"


@pytest.mark.parametrize("added", ["README.md", "model-q4.gguf"])
def test_an_added_file_survives_the_next_export(exported, added):
    export, out = exported
    (out / added).write_text("kept")
    export()
    assert (out.with_name("out.old-1") / added).read_text() == "kept"
    assert why_no_export(out) == "" and not (out / added).exists()


@pytest.mark.parametrize("whole", [True, False])
def test_a_link_instead_of_an_export_is_kept_with_its_target(exported, tmp_path, whole):
    """Also next to a dangling link with the first backup name."""
    export, out = exported
    out.rename(tmp_path / "disk")
    out.symlink_to(tmp_path / ("disk" if whole else "missing"))
    (tmp_path / "out.old-1").symlink_to("nothing")
    export()
    assert (tmp_path / "out.old-2").is_symlink() and (tmp_path / "out.old-1").is_symlink()
    assert (tmp_path / "disk/config.json").is_file() and why_no_export(out) == ""


def test_a_mount_point_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(type(tmp_path), "is_mount", lambda path: path == tmp_path)
    assert why_no_export(tmp_path) == "it is a mount point"
