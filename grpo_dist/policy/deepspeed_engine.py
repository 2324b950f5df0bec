"""DeepSpeed's engine around the policy's model, as its configuration says."""

from __future__ import annotations

from typing import Any

import torch

from grpo_dist.config import PolicyConfig
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.offload import optimizer_device
from grpo_dist.policy.state_files import PolicyFiles


def zero3_loading(settings: dict[str, Any]) -> Any:
    """While this object is alive transformers loads straight into ZeRO-3's partitions."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(settings)


def initialize(module: TokenLogprobs, policy: PolicyConfig, settings: dict[str, Any]) -> Any:
    """The engine, with the optimiser that ``policy`` says. Collective."""
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    o = policy.optimizer
    arguments: dict[str, Any] = {"lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay}
    parameters = [p for p in module.parameters() if p.requires_grad]
    if optimizer_device(policy) != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(parameters, adamw_mode=True, **arguments)
    else:
        optimizer = torch.optim.AdamW(parameters, fused=True, **arguments)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=settings, dist_init_required=False
    )
    engine.train()
    return engine


def own_files(engine: Any) -> Any:
    """The `PolicyFiles` of ``engine`` from now on."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    class Files(PolicyFiles, CheckpointEngine):
        """As DeepSpeed knows them."""

    engine.checkpoint_engine = Files()
    return engine.checkpoint_engine
