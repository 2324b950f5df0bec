"""LoRA adapters as peft writes them, with random values."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from grpo_dist.config import LoRAConfig

PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
LORA = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))  # that continues it


def logits(model, ids):
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits


def loaded(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def made_adapter(model_dir, directory, model=None, **settings):
    """Write an adapter of the model in ``model_dir`` to ``directory``; return the adapted model."""
    adapted = get_peft_model(
        model or loaded(model_dir), LoraConfig(task_type="CAUSAL_LM", **{**PLAIN, **settings})
    )
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(directory)
    return adapted.eval()
