"""Tiny mixture-of-experts models with random weights: 2 layers of 4 experts, 2 of them for each token."""

import json

from grpo_dist.demo.model import random_model

_COMMON = {
    "vocab_size": 272, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 512,
    "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = {"num_experts": 4, "moe_intermediate_size": 96, "intermediate_size": 192, "decoder_sparse_step": 1}
SHAPES = {
    "qwen3_moe": _COMMON | _QWEN | {"head_dim": 32, "norm_topk_prob": True},
    "mixtral": _COMMON | {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": None},
    "qwen2_moe": _COMMON | _QWEN | {"shared_expert_intermediate_size": 160, "norm_topk_prob": False},
}


def write_shape(directory, kind, **changes):
    """Return the config.json of a tiny model of type ``kind``."""
    return write_config(directory, {"model_type": kind} | SHAPES[kind] | changes)


def write_config(directory, config):
    """Return ``config`` as a file that is called after its model type."""
    file = directory / f"{config['model_type']}.json"
    file.write_text(json.dumps(config))
    return file


def tied_model(directory, kind):
    """Return such a model whose experts are almost tied for every token: rounding decides between them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own, source = directory / f"tied-{kind}", expert_model(directory, kind)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            gate = layer.mlp.gate.weight
            gate.copy_(gate[:1] + 1e-8 * torch.randn(gate.shape, generator=generator))
    model.save_pretrained(own)
    AutoTokenizer.from_pretrained(source).save_pretrained(own)
    return own


def expert_model(directory, kind, **changes):
    """Return the directory of such a model, created once per shape."""
    return random_model(write_shape(directory, kind, **changes), seed=0)
