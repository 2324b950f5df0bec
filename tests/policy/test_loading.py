"""Loading a checkpoint: missing weights are never filled at random; too little memory is named."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_dist.policy.model import load_causal_lm

HOW = {"dtype": torch.float32, "attention": "auto", "trust_remote_code": False}


def test_a_checkpoint_with_fewer_layers_than_its_configuration_is_refused(tiny_model, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    assert load_causal_lm(str(tmp_path), **HOW) is not None
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight \(1 such\)"):
        load_causal_lm(str(tmp_path), **HOW)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("unable to mmap 65536 bytes from file <m>: Cannot allocate memory (12)"), MemoryError()],
)
def test_a_model_larger_than_memory_is_refused_with_both_sizes(tiny_model, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match=r"this machine's memory, \d+ GiB, .*max_shard_size") as raised:
        load_causal_lm(str(tiny_model), **HOW)
    assert "download" not in str(raised.value)


def test_other_errors_pass_through(tiny_model, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_causal_lm(str(tiny_model), **HOW)
