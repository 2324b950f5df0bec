"""The memory that a forward pass keeps for the backward pass."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_dist.policy.attention import NAME, register
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.packing import packed, padded
from grpo_dist.types import Rows

SHAPE = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000,
    "tie_word_embeddings": True,
}  # fmt: skip


def kept_for_backward(shape, dtype, kernel, *, checkpointing, prompt, total, change=lambda model: None):
    """Return the bytes of all tensors that a real forward pass keeps, except weights and buffers, and the
    tokens of the stream and of its rows. ``change`` is called with the model before.
    """
    register()
    model = _make_model(shape, dtype, NAME)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    change(model)
    tokens = torch.randint(0, 1000, (2, total))
    tokens[1, :prompt] = tokens[0, :prompt]
    wanted = torch.arange(total).expand(2, -1) >= prompt
    groups = torch.zeros(2, dtype=torch.long)
    rows = Rows(tokens, torch.full((2,), total), groups, torch.full((2,), prompt), None, None, None)
    layout = packed(rows, wanted, kernel)
    return _kept_bytes(model, layout), layout.tokens.numel(), 2 * total


def kept_by_padded_rows(shape, dtype, *, total):
    """Like `kept_for_backward`, for two rows of ``total`` tokens and transformers' operations."""
    model = _make_model(shape, dtype, "eager")
    tokens = torch.randint(0, 1000, (2, total))
    return _kept_bytes(model, padded(tokens, torch.ones_like(tokens, dtype=torch.bool)))


def _make_model(shape, dtype, attention):
    settings = {name: value for name, value in shape.items() if name != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)


def _kept_bytes(model, layout):
    module = TokenLogprobs(model.train(), temperature=1.0, chunk_mib=1)
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # a reference keeps the address from being reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(layout)
    return sum(s.nbytes() for s in kept.values())


class _FlashAttention(torch.autograd.Function):
    """Keeps the same tensors as flash-attention, and computes nothing."""

    @staticmethod
    def forward(ctx, q, k, v, ends, key_ends):
        out, softmax = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
        ctx.save_for_backward(q, k, v, ends, key_ends, out, softmax)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *_ = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None


def varlen_that_keeps(q, k, v, queries, keys, scale, left, dropout):
    """Keep the same tensors as flash-attention, and compute nothing. A `VarlenFunction`."""
    return _FlashAttention.apply(q, k, v, queries.ends, keys.ends)
