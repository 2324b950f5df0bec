"""Floating-point operations of a decoder as counted for model FLOPs utilisation (MFU): without recomputation
and padding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Dense half-precision operations per second per card, from data sheets.
_CARDS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "B100": 1750e12,
    "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12,
    "L4": 121e12, "A10G": 70e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12,
    "T4": 65e12,
}  # fmt: skip

# Model types whose layers are all alike and have the weights that `Shape.from_config` counts.
_COUNTED = {
    "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense",
    "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a decoder that determine its operations: gated MLPs, grouped-query attention.

    ``intermediate``: total width of the MLPs that a token uses: 2 of 4 experts of width 96 and a shared one
    of 160 make 352. Each layer has ``experts`` of width ``expert_width``, 0 in a dense model.

    For other architectures ``matrices`` are the weights per layer that multiply every token, on average;
    ``intermediate`` and ``expert_width`` are the widths of gated MLPs with as many weights.
    ``norms``: normalisations of hidden states per layer.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0
    matrices: int = 0
    norms: int = 2

    @classmethod
    def from_model_dir(cls, model_dir: Path) -> Shape | None:
        """Read the shape of a Hugging Face model directory; None if the type has other weights."""
        c = json.loads((model_dir / "config.json").read_text())
        c = dict(c.get("text_config") or c)
        if (kind := c.pop("model_type", None)) not in _COUNTED:
            return None
        from transformers import AutoConfig  # knows the values that a config.json leaves out

        c = AutoConfig.for_model(kind, **c).to_dict()
        is_alike = not c.get("mlp_only_layers") and c.get("decoder_sparse_step", 1) == 1
        return cls.from_config(c) if is_alike else None

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> Shape:
        """Read the shape of the decoder from a config.json."""
        heads = c["num_attention_heads"]
        experts = c.get("num_experts") or c.get("num_local_experts") or 0
        used = c["num_experts_per_tok"] if experts else 0
        width = c.get("moe_intermediate_size") or c["intermediate_size"] if experts else 0
        shared = c.get("shared_expert_intermediate_size") or 0 if experts else 0
        return cls(
            hidden=c["hidden_size"],
            layers=c["num_hidden_layers"],
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            intermediate=used * width + shared if experts else c["intermediate_size"],
            vocabulary=c["vocab_size"],
            experts=experts,
            experts_per_token=used,
            expert_width=width,
            shared_width=shared,
        )

    @property
    def layer_weights(self) -> int:
        """Weights that multiply every token in one layer."""
        if self.matrices:
            return self.matrices
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        gates = self.experts + (1 if self.shared_width else 0)
        return attention + self.hidden * (3 * self.intermediate + gates)

    @property
    def idle_weights(self) -> int:
        """Weights of the experts in one layer that a token skips."""
        return 3 * self.hidden * self.expert_width * (self.experts - self.experts_per_token)


def decoder_flops(shape: Shape, tokens: float, pairs: float, trained: float, *, frozen: bool) -> float:
    """Return the operations of a forward and a backward pass over ``tokens``, ``trained`` of them with
    logits. ``pairs``: (token, attended token).

    A weight costs 2 operations per token forward and 4 backward; if ``frozen``, 2 backward, because it has
    no weight gradient. Adapters are not counted. Each head multiplies each pair twice (scores, values);
    causal attention of T tokens has T (T + 1) / 2 pairs.
    """
    weights = shape.layers * shape.layer_weights * tokens + shape.hidden * shape.vocabulary * trained
    attention = 2 * shape.layers * shape.heads * shape.head_dim * pairs
    return (4.0 if frozen else 6.0) * weights + 6.0 * attention


def card_peak(name: str) -> float | None:
    """Return data-sheet operations per second of a card, e.g. "NVIDIA H100 80GB HBM3"; None if unknown."""
    names = [card for card in _CARDS if card.lower() in name.lower()]
    return _CARDS[max(names, key=len)] if names else None
