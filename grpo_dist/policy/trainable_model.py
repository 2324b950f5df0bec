"""The model that a policy rank trains, with what `policy` adds to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_dist.config import ModelConfig, PolicyConfig
from grpo_dist.policy.lora import add_adapters, start_from
from grpo_dist.policy.model import compile_layers, load_causal_lm
from grpo_dist.policy.router_replay import replay_routes
from grpo_dist.policy.sequence_parallel import check_heads
from grpo_dist.policy.start_adapter import adapter_in


def trainable_model(
    model_dir: str, dtype: torch.dtype, model: ModelConfig, policy: PolicyConfig, seed: int
) -> Any:
    """Load the transformers model, with adapters where ``policy`` trains those alone. Raises ValueError for
    one that it cannot train.
    """
    causal_lm = load_causal_lm(
        model_dir,
        dtype=dtype,
        attention=model.attention,
        trust_remote_code=model.trust_remote_code,
        gradient_checkpointing=model.gradient_checkpointing,
        packing=model.packing,
        # torch.compile does not read the package's autograd functions, and fuses these operations itself.
        kernels="torch" if policy.compile else model.kernels,
    )
    if policy.router_replay:
        replay_routes(causal_lm, model_dir)
    if policy.lora is not None:
        add_adapters(causal_lm, policy.lora, seed=seed)
        if start := adapter_in(Path(model_dir)):
            start_from(causal_lm, start.adapters())
    if policy.compile:
        compile_layers(causal_lm)
    check_heads(causal_lm, policy.sequence_parallel)
    return causal_lm
