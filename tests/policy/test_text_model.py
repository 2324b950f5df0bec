"""The text model inside a vision-language checkpoint: the same numbers, and exports with the same names."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from grpo_dist.config import PolicyConfig
from grpo_dist.policy.full_weights import FullWeights, write_model
from grpo_dist.policy.lora import base_weights
from grpo_dist.policy.text_model import keep_wrapper, usable_model
from grpo_dist.runtime import model_files
from tests.support.models import BIAS, WRAPPED_SHAPES, biased_experts, wrapper
from tests.support.tiers import slow_after

TOKENS = torch.arange(11, 43)[None]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    return tmp_path


def usable(directory):
    notes = []
    return usable_model(directory, f"model.path = {directory}", notes.append), notes


def trained_export(text_dir, out):
    """Export the text model after a change of every weight; return the changed model."""
    model = AutoModelForCausalLM.from_pretrained(text_dir, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
    weights = {name: tensor.detach() for name, tensor in base_weights(model)}
    write_model(model, weights, {}, out, str(text_dir), False)
    return model.eval()


def check_export(out, changed):
    """Compare the logits of the exported wrapper with those of the changed text model."""
    again = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(again(input_ids=TOKENS).logits, changed(input_ids=TOKENS).logits, atol=1e-5)


@pytest.mark.parametrize("kind", slow_after(WRAPPED_SHAPES, 2))
def test_a_wrapped_text_model_computes_the_same_and_returns_under_its_names(cache, kind):
    source, out = cache / kind, cache / "out"
    whole = wrapper(source, kind)
    text_dir, notes = usable(source)
    assert f"{kind} wraps a text model" in notes[0]
    text = AutoModelForCausalLM.from_pretrained(text_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = whole(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).logits
        assert torch.allclose(text(input_ids=TOKENS).logits, expected, atol=1e-5)
        assert float(expected.std()) > 0.01
    changed = trained_export(text_dir, out)

    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert sorted(after) == sorted(before)
    kept = {name for name in before if any(part in name for part in ("vis", "projector", "scalar"))}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert kept and moved == set(before) - kept
    check_export(out, changed)
    with torch.no_grad():
        assert not torch.allclose(changed(input_ids=TOKENS).logits, expected, atol=1e-2)
    assert (out / "preprocessor_config.json").is_file()
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(source))
    assert usable(out)[0] != out  # trains on


def test_a_stored_head_that_equals_the_embedding_is_trained_and_returned_as_one(cache):
    """Mistral's wrapper ties by default, but checkpoints store the head anyway."""
    source, out = cache / "m", cache / "out"
    wrapper(source, "mistral3")
    weights = load_file(source / "model.safetensors")
    head, embedding = (f"language_model.{name}.weight" for name in ("lm_head", "model.embed_tokens"))
    assert head not in weights
    save_file(weights | {head: weights[embedding].clone()}, source / "model.safetensors", {"format": "pt"})
    changed = trained_export(usable(source)[0], out)
    after = load_file(out / "model.safetensors")
    assert torch.equal(after[head], after[embedding])
    assert torch.equal(after[head], changed.get_input_embeddings().weight)

    other = weights[embedding] + torch.randn(weights[embedding].shape)
    save_file(weights | {head: other}, source / "model.safetensors", {"format": "pt"})
    text_dir, _ = usable(source)
    untied = trained_export(text_dir, cache / "untied")
    after = load_file(cache / "untied" / "model.safetensors")
    assert torch.equal(after[head], untied.lm_head.weight.detach())
    assert not torch.equal(after[head], after[embedding])


def test_a_model_trained_earlier_from_a_text_model_is_exported_into_the_wrapper(cache):
    """A cold start writes a separate model, from which a run starts."""
    source, started, out = cache / "m", cache / "sft", cache / "out"
    wrapper(source, "gemma3")
    text_dir, _ = usable(source)
    model = AutoModelForCausalLM.from_pretrained(text_dir, dtype=torch.float32)
    model.save_pretrained(started)
    AutoTokenizer.from_pretrained(text_dir).save_pretrained(started)
    keep_wrapper(text_dir, started)
    changed = trained_export(started, out)
    check_export(out, changed)


def test_large_models_are_written_in_several_files(cache, monkeypatch):
    monkeypatch.setattr(model_files, "_SHARD", 100_000)
    source, out = cache / "m", cache / "out"
    wrapper(source, "gemma3")
    changed = trained_export(usable(source)[0], out)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 3
    check_export(out, changed)


def test_buffers_of_a_checkpoint_are_exported_and_sent(cache):
    """GLM-4-MoE and DeepSeek choose experts by a bias that is no parameter."""
    source, out = cache / "m", cache / "out"
    bias = biased_experts(source)
    trained_export(source, out)
    assert torch.equal(load_file(out / "model.safetensors")[BIAS], bias)
    weights = FullWeights(AutoModelForCausalLM.from_pretrained(source), PolicyConfig(zero_stage=2))
    sent = {name: tensor for bucket in weights.buckets(1 << 20) for name, tensor in bucket}
    assert torch.equal(sent[BIAS], bias)  # vLLM leaves weights that are not sent undefined


def with_another_text_name(directory):
    wrapper(directory, "gemma3")
    weights = load_file(directory / "model.safetensors")
    weights["language_model.model.layers.0.gate.weight"] = torch.zeros(1)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def with_a_missing_layer(directory):
    wrapper(directory, "gemma3")
    weights = load_file(directory / "model.safetensors")
    del weights["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (with_another_text_name, "transformers' text model has no model.layers.0.gate.weight"),
        (with_a_missing_layer, "the checkpoint has no model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_an_incomplete_text_model_is_refused(cache, damage, words):
    damage(cache / "m")
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        usable(cache / "m")
    assert "\n" not in str(raised.value) and "model.path = " in str(raised.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_vl"}, "no causal language model of type qwen3_vl_text"),
        ({"model_type": "t5"}, "t5 is an encoder with a decoder"),
        ({"model_type": "clip"}, "clip"),
        ({"model_type": "resnet"}, "resnet is no causal language model"),
        ({"model_type": "whisper9"}, "model_type = whisper9, which transformers"),
        ({"model_type": "own", "auto_map": {}}, "set model.trust_remote_code=true"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
         "LlamaForSequenceClassification is a classifier, such as a reward model"),
    ],
)  # fmt: skip
def test_anything_but_a_causal_language_model_is_refused_in_one_line(cache, config, words):
    (cache / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.zeros(1)}, cache / "model.safetensors")
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        usable(cache)
    assert len(str(raised.value)) < 500 and "\n" not in str(raised.value)
