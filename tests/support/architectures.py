"""Tiny random models of the architectures that engine and trainer both compute."""

from grpo_dist.demo.model import random_model
from tests.support.expert_models import write_config

_COMMON = {
    "vocab_size": 272, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 512,
    "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 8.0}
_LINEAR, _DYNAMIC = (
    {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0} for kind in ("linear", "dynamic")
)
_LONG = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [2.0] * 16}
_ROPE = {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
_ORIGINAL = {"original_max_position_embeddings": 256, "rope_theta": 10000.0}
_PHI3 = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
_ALL_HEADS = {"num_key_value_heads": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
# vLLM's Gemma and Cohere have no head of their own.
_TIED = {"sliding_window": 16, "tie_word_embeddings": True}
# Caps that change the attention and the logits of a random model.
_GEMMA2 = _TIED | {"head_dim": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}

# Model type and what differs, by the name of the case.
SHAPES = {
    "cohere2, scaled logits": ("cohere2", _TIED | {"sliding_window": 256, "logit_scale": 0.25}),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4": ("exaone4", {"sliding_window": 16, "sliding_window_pattern": 2}),
    "gemma": ("gemma", {"head_dim": 32}),
    "glm4": ("glm4", {"pad_token_id": 0}),
    "gemma2, capped logits": ("gemma2", _GEMMA2),
    "gemma3": ("gemma3_text", _TIED | {"head_dim": 32}),
    "glm4_moe": ("glm4_moe", _EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 32}),
    "gpt_neox": ("gpt_neox", _ALL_HEADS),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}),
    "granite, scaled logits": ("granite", {"logits_scaling": 4.0}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 32}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, dynamic positions": ("llama", {"rope_parameters": _DYNAMIC}),
    "llama, linear positions": ("llama", {"rope_parameters": _LINEAR, "max_position_embeddings": 128}),
    "llama, scaled positions": ("llama", {"rope_parameters": _LLAMA3 | _ROPE}),
    "mistral, sliding window": ("mistral", {"sliding_window": 16, "head_dim": 32}),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3, sliding window": ("olmo3", {"sliding_window": 16}),
    "phi": ("phi", {}),
    "phi3": ("phi3", _PHI3),
    "phi3, longrope": (
        "phi3",
        _PHI3 | {"rope_parameters": {"rope_type": "longrope"} | _LONG | _ORIGINAL} | _ORIGINAL,
    ),
    "qwen2, yarn": ("qwen2", {"rope_parameters": _YARN | _ROPE, "max_position_embeddings": 64}),
    "qwen3": ("qwen3", {"head_dim": 64}),
    "seed_oss": ("seed_oss", {"head_dim": 32}),
    "smollm3": ("smollm3", {"pad_token_id": 0}),
    "starcoder2": ("starcoder2", {}),
}


def architecture(directory, name):
    """Return the directory of the model ``name``, created once."""
    kind, changes = SHAPES[name]
    return random_model(write_config(directory, {"model_type": kind} | _COMMON | changes), seed=0)
