"""DeepSpeed's configuration from ours, with the user's `policy.deepspeed` section merged into it, and the
settings and checks of `policy.offload`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from grpo_dist.config import PolicyConfig
from grpo_dist.config.secrets import shown_value

# Set by the trainer itself: a user's value would change the gradient or be ignored silently.
_OURS = {
    "train_batch_size": "is set by batch.prompts_per_step and batch.samples_per_prompt",
    "train_micro_batch_size_per_gpu": "is set by batch.micro_batch_tokens",
    "gradient_accumulation_steps": "is set by batch.micro_batch_tokens",
    "gradient_clipping": "is set by policy.optimizer.max_grad_norm",
    "optimizer": "is set by policy.optimizer",
    "scheduler": "is set by policy.optimizer.schedule",
    "bf16": "is set by model.dtype",
    "fp16": "is set by model.dtype (float32 or bfloat16)",
    "amp": "is set by model.dtype",
    "torch_autocast": "is set by model.dtype",
    "data_types": "is set by model.dtype",
    "zero_optimization.stage": "is set by policy.zero_stage",
    "zero_optimization.offload_optimizer.device": "is set by policy.offload.optimizer",
    "zero_optimization.offload_param.device": "is set by policy.offload.parameters",
} | dict.fromkeys(
    ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor"),
    "would scale gradients, which are already divided by the denominators of the whole step",
)


def deepspeed_config(policy: PolicyConfig, *, bfloat16: bool) -> dict[str, Any]:
    """Return the dictionary for `deepspeed.initialize`, for weights in bfloat16 or else float32. Raises
    ValueError for keys that the trainer sets.
    """
    zero = policy.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ValueError(
            f"`policy.deepspeed.zero_optimization` = {zero}: expected a mapping of DeepSpeed's keys to values"
        )
    values = dict(policy.deepspeed)
    for section in ("zero_optimization", *(f"zero_optimization.offload_{p}" for p in ("optimizer", "param"))):
        if isinstance(inner := values.get(section), dict):
            values |= {f"{section}.{key}": value for key, value in inner.items()}
    for key, why in _OURS.items():
        if key in values:
            raise ValueError(f"`policy.deepspeed.{key}` = {values[key]} {why}; remove it")
    offloads = {
        f"offload_{part}": {"device": device}
        | ({"nvme_path": policy.offload.nvme_path} if device == "nvme" else {})
        for part, device in (("optimizer", policy.offload.optimizer), ("param", policy.offload.parameters))
        if device != "none"
    }
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
        | offloads,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # DeepSpeed's own timer waits for the GPU before each forward pass.
        "timers": {"throughput": {"enabled": False}},
    }
    if bfloat16 and policy.zero_stage == 0:
        raise ValueError(
            "`policy.zero_stage` = 0 with bfloat16: DeepSpeed accumulates gradients in float32 only with "
            "ZeRO; use policy.zero_stage=1, which costs nothing more, or model.dtype=float32"
        )
    if bfloat16:
        base["bf16"] = {"enabled": True, "check_grad_overflow": True}  # skips NaN gradients
        base["data_types"] = {"grad_accum_dtype": "fp32"}
        if policy.zero_stage == 1:
            # ZeRO-1 reduces once per update, in the accumulation dtype; other stages at every micro-batch.
            base["communication_data_type"] = "fp32"
            base["bf16"]["immediate_grad_update"] = True  # else a full bfloat16 gradient stays, too
    return _merge(base, policy.deepspeed)


def overlaps_reduction(policy: PolicyConfig) -> bool:
    """Return whether gradients are reduced during the backward pass: only if the user asks for it.

    DeepSpeed has open reports of wrong gradients with it (issue 5545: a data race in all stages; 8061: NaN
    with compiled layers), and nothing here could rule them out for a run.
    """
    return bool(policy.deepspeed.get("zero_optimization", {}).get("overlap_comm", False))


def check_values(policy: PolicyConfig) -> None:
    """Raise ValueError for a key or value in `policy.deepspeed.zero_optimization` that DeepSpeed refuses.
    Imports DeepSpeed only if there are any.
    """
    if not policy.deepspeed.get("zero_optimization"):
        return
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError  # with DeepSpeed, above

    user_settings = policy.deepspeed["zero_optimization"]
    for name, value in user_settings.items():
        field = DeepSpeedZeroConfig.model_fields.get(name)
        if isinstance(value, bool) and field is not None and field.annotation in (int, float):
            raise ValueError(
                f"`policy.deepspeed.zero_optimization.{name}` = {str(value).lower()} is not a number; "
                "expected a number"
            )
    try:
        DeepSpeedZeroConfig(**user_settings)
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


def size_buffers(settings: dict[str, Any], largest: int) -> None:
    """Size DeepSpeed's buffers for parameters on NVMe by ``largest``, the elements of the largest parameter.

    Its default of 10^8 is too small for the embedding of a large vocabulary (the swap then fails), and takes
    gigabytes if all parameters are small.
    """
    section = settings["zero_optimization"].get("offload_param", {})
    if section.get("device") == "nvme":
        section.setdefault("buffer_size", largest)


def create_moments(optimizer: Any) -> None:
    """Give a new ZeRO-3 optimiser on NVMe the moments it would make at its first step. Call it before loading
    a checkpoint: DeepSpeed reads back only state that it knows to be on disk, else starts without moments.
    """
    import torch  # a plan reads this module without it

    timers: set[str] = set()
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer._prepare_sub_group(number, timers)
        state = optimizer.optimizer.state[weights]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weights), exp_avg_sq=torch.zeros_like(weights))
        optimizer._release_sub_group(number, timers)


def set_steps(optimizer: Any, steps: int) -> None:
    """Set Adam's step count, which its bias correction needs and the NVMe files lack."""
    for state in optimizer.optimizer.state.values():
        state["step"] = steps


def check_offload(policy: PolicyConfig) -> None:
    """Raise ValueError if this machine lacks what offloading needs, before anything is started."""
    offloads = {policy.offload.optimizer, policy.offload.parameters}
    if offloads == {"none"}:
        return
    from grpo_dist.policy.extensions import LIBAIO, list_kernels, unbuilt  # imports torch

    missing = unbuilt(list_kernels(policy, "cuda"))  # those of CPUs alone are optional
    compiler = os.environ.get("CXX", "c++")
    if "CPUAdamBuilder" in missing and shutil.which(compiler) is None and not _is_installed("cpu_adam"):
        raise ValueError(
            "the optimiser on the CPU (`policy.offload.optimizer`): DeepSpeed compiles its Adam at first "
            f"use, and there is no C++ compiler {compiler!r} here; install g++, or set it to none"
        )
    path = policy.offload.nvme_path or ""
    if "nvme" not in offloads:
        return
    if not Path(path).is_dir() or not os.access(path, os.W_OK):
        raise ValueError(
            f"`policy.offload.nvme_path` = {path}: expected a directory that can be written, on a local NVMe "
            "disk of every node with policy ranks; make it, or name another"
        )
    if "AsyncIOBuilder" in missing and not _can_build_async_io():
        raise ValueError(
            "`policy.offload` = nvme: DeepSpeed's asynchronous file access cannot be built, because libaio "
            f"and its header are not found; install {LIBAIO}"
        )


def _can_build_async_io() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder  # takes seconds

    return bool(AsyncIOBuilder().is_compatible())


def _is_installed(kernel: str) -> bool:
    """Return whether DeepSpeed was installed with ``kernel``."""
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(kernel))
