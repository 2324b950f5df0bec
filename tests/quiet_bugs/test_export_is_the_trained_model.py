"""verl#7285, "model_merger writes a "merged" directory that is byte-identical to the base model", verl#4553
and verl#4948: the export of a run with adapters was its base model, or merged with another model, and its
adapter had `lora_alpha` 0.
"""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_dist.config import LoRAConfig, PolicyConfig
from grpo_dist.policy.full_weights import FullWeights, write_model
from grpo_dist.policy.lora import adapter_parameters, add_adapters

SETTINGS = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))
TOKENS = torch.tensor([[5, 17, 3, 29]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.double()


@pytest.fixture(scope="module")
def exported(tiny_model, tmp_path_factory):
    """Return the directory of an export, and its model, whose adapters have moved."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    add_adapters(model, SETTINGS, seed=0)
    generator = torch.Generator().manual_seed(1)
    for _, tensor in adapter_parameters(model):
        tensor.data.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
    weights = FullWeights(model, PolicyConfig(lora=SETTINGS, zero_stage=0))
    whole, low_rank = (
        {n: t.clone() for bucket in weights.buckets(1 << 20, **how) for n, t in bucket}
        for how in ({"as_held": True}, {"adapters_only": True})
    )
    directory = tmp_path_factory.mktemp("export") / "model"
    write_model(model, whole, low_rank, directory, str(tiny_model), trust_remote_code=False)
    return directory, model


def test_the_bug_writes_the_base_model(tiny_model, exported):
    directory, model = exported
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    without_adapters = dict(base.named_parameters())
    assert (logits(base) - logits(model)).abs().max() > 0.01
    written = load_file(directory / "model.safetensors")
    changed = [n for n, t in written.items() if not torch.equal(t, without_adapters[n].data)]
    assert changed and all(n.split(".")[-2] in SETTINGS.target_modules for n in changed)
    assert len(changed) == len(list(adapter_parameters(model))) / 2


def test_the_export_computes_what_the_trained_model_computes(exported):
    directory, model = exported
    alone = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.testing.assert_close(logits(alone), logits(model), rtol=1e-4, atol=1e-5)


def test_the_adapter_names_the_model_it_belongs_to_and_its_scale(tiny_model, exported):
    directory, model = exported
    adapter = json.loads((directory / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tiny_model)
    assert (adapter["lora_alpha"], adapter["r"]) == (8, 4)
    base = AutoModelForCausalLM.from_pretrained(adapter["base_model_name_or_path"], dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, directory / "adapter")
    torch.testing.assert_close(logits(adapted), logits(model), rtol=1e-4, atol=1e-5)
