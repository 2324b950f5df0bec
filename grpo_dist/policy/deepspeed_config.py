"""DeepSpeed's configuration from ours. The user's `policy.deepspeed` section is merged over it."""

from __future__ import annotations

from typing import Any

import torch

from grpo_dist.config import PolicyConfig
from grpo_dist.config.secrets import shown_value
from grpo_dist.policy.offload import offload_config

# Set by the trainer itself: a user's value would change the gradient or be ignored silently.
_OURS = {
    "train_batch_size": "batch.prompts_per_step and batch.samples_per_prompt",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_tokens",
    "gradient_accumulation_steps": "batch.micro_batch_tokens",
    "gradient_clipping": "policy.optimizer.max_grad_norm",
    "optimizer": "policy.optimizer",
    "scheduler": "policy.optimizer.schedule",
    "bf16": "model.dtype",
    "fp16": "model.dtype (float32 or bfloat16)",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
    "data_types": "model.dtype",
}
# Factors on gradients: the losses carry the denominators of the whole step already.
_FACTORS = ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor")


def deepspeed_config(policy: PolicyConfig, *, dtype: torch.dtype) -> dict[str, Any]:
    """Return the dictionary for `deepspeed.initialize`. Raises ValueError for keys that the trainer sets."""
    for key, ours in _OURS.items():
        if key in policy.deepspeed:
            raise ValueError(
                f"`policy.deepspeed.{key}` = {policy.deepspeed[key]} is set by {ours}; remove it"
            )
    for key in _FACTORS:
        if key in policy.deepspeed:
            raise ValueError(
                f"`policy.deepspeed.{key}` = {policy.deepspeed[key]} would scale gradients, whose "
                "denominators are those of the whole step already; remove it"
            )
    zero = policy.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(
            f"`policy.deepspeed.zero_optimization` = {zero}: expected a mapping of DeepSpeed's keys to values"
        )
    if "stage" in zero:
        raise ValueError(
            f"`policy.deepspeed.zero_optimization.stage` = {zero['stage']}: set `policy.zero_stage` instead"
        )
    base: dict[str, Any] = {
        # Micro-batches hold a varying number of rows, so DeepSpeed gets 1 and the losses carry the
        # denominators.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": policy.optimizer.max_grad_norm,
        "zero_optimization": {
            "stage": policy.zero_stage,
            "contiguous_gradients": True,
            "overlap_comm": overlaps_reduction(policy),
        }
        | offload_config(policy),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed's own timer waits for the GPU before each forward pass.
        "timers": {"throughput": {"enabled": False}},
    }
    if dtype == torch.bfloat16 and policy.zero_stage == 0:
        raise ValueError(
            "`policy.zero_stage` = 0 with bfloat16: DeepSpeed accumulates gradients in float32 only with "
            "ZeRO; use policy.zero_stage=1, which costs nothing more, or model.dtype=float32"
        )
    if dtype == torch.bfloat16:
        base["bf16"] = {"enabled": True, "check_grad_overflow": True}  # NaN gradients move nothing
        base["data_types"] = {"grad_accum_dtype": "fp32"}
        if policy.zero_stage == 1:
            # They are reduced once an update, as they were added up. Others are at every micro-batch.
            base["communication_data_type"] = "fp32"
            base["bf16"]["immediate_grad_update"] = True  # else a whole bfloat16 gradient stays, too
    return _merge(base, policy.deepspeed)


def overlaps_reduction(policy: PolicyConfig) -> bool:
    """Return whether gradients are reduced during the backward pass: where the user asks for it.

    DeepSpeed's reports of wrong gradients with it are open (issue 5545: a data race in all stages; 8061: NaN
    with compiled layers), and nothing here could show that a run is free of them.
    """
    return bool(policy.deepspeed.get("zero_optimization", {}).get("overlap_comm", False))


def check_values(policy: PolicyConfig) -> None:
    """Raises ValueError for a key or value in `policy.deepspeed.zero_optimization` that DeepSpeed refuses.
    Imports DeepSpeed where there are any.
    """
    if not policy.deepspeed.get("zero_optimization"):
        return
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError  # with DeepSpeed, above

    own = policy.deepspeed["zero_optimization"]
    for name, value in own.items():
        field = DeepSpeedZeroConfig.model_fields.get(name)
        if isinstance(value, bool) and field is not None and field.annotation in (int, float):
            raise ValueError(
                f"`policy.deepspeed.zero_optimization.{name}` = {str(value).lower()} is not a number; "
                "expected a number"
            )
    try:
        DeepSpeedZeroConfig(**own)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"`policy.deepspeed.zero_optimization.{where}` = {shown_value(first['loc'], first['input'])}: "
            "DeepSpeed refuses it: "
            f"{first['msg'].lower()}"
        ) from error


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both else value
    return merged
