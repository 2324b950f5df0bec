"""Small models of many kinds: architectures, mixtures of experts, wrapped text models, adapters."""

import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from grpo_dist.config import LoRAConfig
from grpo_dist.demo.model import random_model
from grpo_dist.demo.tokenizer import character_tokenizer

# Tiny random models of the architectures that engine and trainer both compute.

COMMON = {
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
# vLLM's Gemma and Cohere have no separate head.
_TIED = {"sliding_window": 16, "tie_word_embeddings": True}
# Caps that change the attention and the logits of a random model.
_GEMMA2 = _TIED | {"head_dim": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}

# Model type and changes to `COMMON`, by case.
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
    # At 0.1 the squared ReLU leaves float32 log-probs 2e-5 from float64, other shapes 4e-6.
    "nemotron": ("nemotron", {"initializer_range": 0.05}),
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
    return random_model(write_config(directory, {"model_type": kind} | COMMON | changes), seed=0)


# Tiny mixture-of-experts models with random weights: 2 layers of 4 experts, 2 of them for each token.

_EXPERT_COMMON = {
    "vocab_size": 272, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 512,
    "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = {"num_experts": 4, "moe_intermediate_size": 96, "intermediate_size": 192, "decoder_sparse_step": 1}
EXPERT_SHAPES = {
    "qwen3_moe": _EXPERT_COMMON | _QWEN | {"head_dim": 32, "norm_topk_prob": True},
    "mixtral": _EXPERT_COMMON | {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": None},
    "qwen2_moe": _EXPERT_COMMON | _QWEN | {"shared_expert_intermediate_size": 160, "norm_topk_prob": False},
}


def write_shape(directory, kind, **changes):
    """Return the config.json of a tiny model of type ``kind``."""
    return write_config(directory, {"model_type": kind} | EXPERT_SHAPES[kind] | changes)


def write_config(directory, config):
    """Return ``config`` as a file that is called after its model type."""
    file = directory / f"{config['model_type']}.json"
    file.write_text(json.dumps(config))
    return file


def tied_model(directory, kind):
    """Return such a model whose experts are almost tied for every token: rounding decides between them."""
    target, source = directory / f"tied-{kind}", expert_model(directory, kind)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            gate = layer.mlp.gate.weight
            gate.copy_(gate[:1] + 1e-8 * torch.randn(gate.shape, generator=generator))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


def expert_model(directory, kind, **changes):
    """Return the directory of such a model, created once per shape."""
    return random_model(write_shape(directory, kind, **changes), seed=0)


# A tiny GLM-4-MoE whose routers choose experts by a bias: a buffer of the checkpoint, not a parameter.

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


# Tiny random vision-language checkpoints that wrap a text model, as transformers writes them.

_TEXT = {
    "vocab_size": 272, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 512, "head_dim": 32,
    "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 14, "image_size": 28,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128,
    "num_position_embeddings": 16,
}  # fmt: skip
_ALL_FULL = {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": False}
_WRAPPED_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 16}
_CLIP = _VISION | {"model_type": "clip_vision_model"}

WRAPPED_SHAPES = {  # settings of text and vision, by model type
    "gemma3": (_TEXT | {"sliding_window": 16}, _VISION),
    "gemma4": (_TEXT | {"vocab_size_per_layer_input": 272, "hidden_size_per_layer_input": 8}, _VISION),
    "llava": (_TEXT | {"model_type": "llama", "tie_word_embeddings": False}, _CLIP),
    "mistral3": (_TEXT | {"model_type": "mistral"}, _PIXTRAL),
    "qwen3_5": (_TEXT | _ALL_FULL, _QWEN_VISION),
    "qwen3_5_moe": (_TEXT | _ALL_FULL | _WRAPPED_EXPERTS, _QWEN_VISION),
}


def wrapper(directory, kind, **text):
    """Write the checkpoint of type ``kind`` to ``directory``; return the model. ``text``: changes to its text
    model's configuration.
    """
    text_shape, vision_shape = WRAPPED_SHAPES[kind]
    config = AutoConfig.for_model(kind, text_config=text_shape | text, vision_config=vision_shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # ones and zeros hide swapped names
                parameter.data += 0.1 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer += 0.1 * torch.randn(buffer.shape)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text('{"image_size": 28}')
    character_tokenizer(ascii_only=True).save_pretrained(directory)
    return model


# LoRA adapters as peft writes them, with random values.

PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
LORA = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))  # continues such an adapter


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
