"""Writes small GGUF files as llama.cpp writes them, from Hugging Face models of the Llama architecture."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def llama(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    """A random model of 2 layers; its vocabulary is that of `write_gguf`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokens()[0]), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        tie_word_embeddings=tied, rms_norm_eps=1e-5, rope_theta=100000.0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens() -> tuple[list[str], list[str]]:
    """The vocabulary of a byte-level BPE, and its merges: two spaces are one token, as in SmolLM2's."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12"], ["Ġ Ġ", "1 2"]


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    *,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "smollm",
    architecture: str = "llama",
    left_out: str = "",
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write ``model`` to ``file`` with ``matrices`` as their type, without the tensor ``left_out``, and with
    further text ``fields`` and ``tensors``.
    """
    config, writer = model.config, GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, pre)
    for name, value in (fields or {}).items():
        writer.add_string(name, value)
    for name, tensor in model.state_dict().items():
        if (theirs := _name(name)) == left_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy()
        if "attn_q." in theirs or "attn_k." in theirs:
            heads = config.num_attention_heads if "attn_q." in theirs else config.num_key_value_heads
            values = _interleaved(values, heads)
        kind = matrices if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(theirs, quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    vocabulary, merges = tokens()
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in vocabulary]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.weight"


def _interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a projection as llama.cpp rotates them: pairs of neighbours, not of halves."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, weights.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))
