"""A tiny GLM-4-MoE whose routers choose experts by a bias: a buffer of the checkpoint, no parameter."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_dist.demo.tokenizer import character_tokenizer

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
_SHAPE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
    "vocab_size": 272, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "head_dim": 32, "max_position_embeddings": 512,
    "initializer_range": 0.1, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def biased_experts(directory):
    """Write the model to ``directory``; return the bias of its router, float32 [4]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("glm4_moe", **_SHAPE)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    bias = model.get_buffer(BIAS)
    bias.copy_(torch.tensor([0.25, 0.25, -0.25, 0.0]))
    model.save_pretrained(directory)
    character_tokenizer(ascii_only=True).save_pretrained(directory)
    return bias
