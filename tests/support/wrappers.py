"""Tiny random vision-language checkpoints that wrap a text model, as transformers writes them."""

import torch

from grpo_dist.demo.tokenizer import character_tokenizer

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
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 16}
_CLIP = _VISION | {"model_type": "clip_vision_model"}

# Of text and vision, by model type.
SHAPES = {
    "gemma3": (_TEXT | {"sliding_window": 16}, _VISION),
    "gemma4": (_TEXT | {"vocab_size_per_layer_input": 272, "hidden_size_per_layer_input": 8}, _VISION),
    "llava": (_TEXT | {"model_type": "llama", "tie_word_embeddings": False}, _CLIP),
    "mistral3": (_TEXT | {"model_type": "mistral"}, _PIXTRAL),
    "qwen3_5": (_TEXT | _ALL_FULL, _QWEN_VISION),
    "qwen3_5_moe": (_TEXT | _ALL_FULL | _EXPERTS, _QWEN_VISION),
}


def wrapper(directory, kind, **text):
    """Write the checkpoint of type ``kind`` to ``directory``; return the model. ``text``: changes its text
    model's configuration.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    of_text, of_vision = SHAPES[kind]
    config = AutoConfig.for_model(kind, text_config=of_text | text, vision_config=of_vision)
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
