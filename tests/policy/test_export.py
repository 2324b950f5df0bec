"""The export of models whose generation config transformers loads, but refuses to save."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from grpo_dist.policy.export import write_model


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("generation_config.json", {"temperature": 0.6, "top_p": 0.95}),
        ("generation_config.json", {"pad_token_id": -1}),
        ("generation_config.json", {"num_beams": 1, "length_penalty": 2.0}),
        ("config.json", {"temperature": 0.7}),
    ],
)
def test_a_generation_config_that_transformers_refuses_to_save_is_exported_as_it_is(
    tiny_model, tmp_path, file, own
):
    start, out = tmp_path / "start", tmp_path / "out"
    shutil.copytree(tiny_model, start)
    before = json.loads((start / file).read_text()) if (start / file).is_file() else {}
    (start / "generation_config.json").unlink()  # which would be read in place of config.json
    (start / file).write_text(json.dumps(before | own))
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with pytest.raises(ValueError, match="invalid"):
        model.generation_config.save_pretrained(tmp_path / "refused")
    held = model.generation_config
    write_model(model, model.state_dict(), {}, out, str(start), trust_remote_code=False)
    assert model.generation_config is held
    assert own.items() <= json.loads((out / "generation_config.json").read_text()).items()
    assert GenerationConfig.from_pretrained(out).to_dict() == held.to_dict()
    assert load_file(out / "model.safetensors").keys() == load_file(start / "model.safetensors").keys()
