"""GGUF files as models: the same weights and tokens, what quantisation lost, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.config import ModelConfig, SFTConfig, TeacherConfig
from grpo_dist.demo.model import made_model
from grpo_dist.policy.gguf_model import gguf_config, gguf_model, loss_of
from grpo_dist.runs.prepare import resolve_model, sft_model
from tests.support.models import CHAT_TEMPLATE, llama, write_gguf

IDS = torch.tensor([[5, 9, 200, 31, 77, 3, 258]])


def convert(file: Path) -> Path:
    return gguf_model(file, f"model.path = {file}")


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_that_is_not_quantised_gives_the_logits_of_its_model(tmp_path, tied):
    model = llama(tied=tied)
    directory = convert(write_gguf(tmp_path / "whole.gguf", model))
    read = AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(read(IDS).logits, model(IDS).logits, rtol=0, atol=0)
    assert loss_of(directory) is None
    weights = load_file(directory / "model.safetensors")
    assert ("lm_head.weight" in weights) == (not tied)
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] == tied
    assert "quantization_config" not in config and config["dtype"] == "float32"


def test_quantised_weights_become_the_float32_values_that_they_stand_for(tmp_path):
    model, kind = llama(), GGMLQuantizationType.Q8_0
    directory = convert(write_gguf(tmp_path / "small.gguf", model, matrices=kind))
    weights, before = load_file(directory / "model.safetensors"), model.state_dict()
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        whole = before[name].numpy()
        expected = quants.dequantize(quants.quantize(whole, kind), kind)
        np.testing.assert_array_equal(weights[name].numpy(), expected)
        assert 0 < np.abs(expected - whole).max() < np.abs(whole).max() / 100
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    # Q8_0 has blocks of 32 weights of 8 bits and one scale of 16 bits: 8.5 bits a weight.
    matrices = sum(t.numel() for t in weights.values() if t.ndim == 2)
    norms = sum(t.numel() for t in weights.values() if t.ndim == 1)
    mean = (8.5 * matrices + 32 * norms) / (matrices + norms)
    assert loss_of(directory) == (
        f"small.gguf: quantised weights, {mean:.1f} bits per weight in the mean "
        f"(Q8_0: {matrices / 1e6:.1f} M of 8.5 bits); what rounding lost is lost, and the de-quantised "
        "float32 weights are what is trained"
    )


FOUND = {
    "model.path": lambda file, say: resolve_model(ModelConfig(path=file), None, 0, say),
    "teacher": lambda file, say: resolve_model(
        TeacherConfig(name="t", model=file).model_section(ModelConfig(path="x")), None, 0, say
    ),
    "sft.model, before a cold start": lambda file, say: resolve_model(
        ModelConfig(path="sft"), SFTConfig(model=file, data="demo:add3"), 0, say, train_first=False
    ),
    "sft.model, on the ranks": lambda file, say: sft_model(
        SFTConfig(model=file, data="demo:add3"), None, say
    ),
}


@pytest.mark.parametrize("find", FOUND.values(), ids=FOUND)
def test_the_run_reports_what_was_lost_whatever_names_the_file(tmp_path, find):
    file, said = write_gguf(tmp_path / "m.gguf", llama(), matrices=GGMLQuantizationType.Q8_0), []
    directory = find(str(file), said.append)
    assert directory == convert(file) and said == [loss_of(directory)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["a", "ĠĠ", "1", "2", "Ġ", "1"]),  # digits are split from spaces, and from each other
        ("gpt-2", ["a", "Ġ", "Ġ", "12", "Ġ", "1"]),  # " 12" is one word of GPT-2's pattern
    ],
)
def test_text_is_split_as_the_pre_tokenizer_of_the_file_splits_it(tmp_path, pre, expected):
    directory = convert(write_gguf(tmp_path / f"{pre}.gguf", llama(), pre=pre))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("a  12 1") == expected
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.tokenize("<|im_start|>a") == ["<|im_start|>", "a"]


def test_a_file_is_converted_once_wherever_it_lies(tmp_path):
    file = write_gguf(tmp_path / "twice.gguf", llama())
    first = convert(file)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "other").mkdir()
    moved = file.rename(tmp_path / "other/twice.gguf")
    assert convert(moved) == first and (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert convert(write_gguf(tmp_path / "twice.gguf", llama(seed=1))) != first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre = unheard-of, is not known"),
        ({"architecture": "unheard-of"}, "cannot be converted"),
        (
            {"left_out": "blk.1.ffn_up.weight"},
            "lacks 1 of the model's tensors, e.g. model.layers.1.mlp.up_proj",
        ),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type = yarn"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "the file holds .* weights, of which"),
    ],
)
def test_what_would_be_another_model_than_the_file_is_refused(tmp_path, changes, message):
    file = write_gguf(tmp_path / "m.gguf", llama(), **changes)
    with pytest.raises(ValueError, match=message) as error:
        made_model(str(file), "model.path", print, seed=0)
    assert str(error.value).startswith(f"model.path = {file}: ")


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b[:40], lambda b: b"no" + b, lambda b: b""]
)
def test_a_damaged_file_is_refused_with_one_message(tmp_path, damage):
    file = write_gguf(tmp_path / "m.gguf", llama())
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"the GGUF file cannot be converted .* download it again"):
        convert(file)


@pytest.mark.parametrize("read", [gguf_model, gguf_config])
@pytest.mark.parametrize("number", [1, 3])
def test_a_part_of_a_split_file_is_refused_with_how_to_join_the_parts(tmp_path, read, number):
    whole = write_gguf(tmp_path / "whole.gguf", llama())
    file = whole.rename(tmp_path / f"big-Q4_K-{number:05}-of-00003.gguf")
    with pytest.raises(ValueError) as error:
        read(file, f"model.path = {file}")
    assert f"model.path = {file}: this is part {number} of 3 of a split GGUF file" in str(error.value)
    assert "--merge big-Q4_K-00001-of-00003.gguf big-Q4_K.gguf`" in str(error.value)


def test_a_missing_file_is_refused_by_its_key(tmp_path):
    with pytest.raises(ValueError, match=r"sft.model = .*none.gguf: no such file"):
        made_model(str(tmp_path / "none.gguf"), "sft.model", print, seed=0)
