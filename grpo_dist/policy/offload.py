"""Policy state outside the accelerator: DeepSpeed's settings for `policy.offload`, and checks that this
machine has what it needs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from grpo_dist.config import PolicyConfig

_KEYS = {"optimizer": "offload_optimizer", "parameters": "offload_param"}


def offload_config(policy: PolicyConfig) -> dict[str, Any]:
    """Return the keys for DeepSpeed's `zero_optimization`; none where nothing is offloaded.

    Raises ValueError when `policy.deepspeed` names another device than `policy.offload` does.
    """
    offload, theirs = policy.offload, policy.deepspeed.get("zero_optimization", {})
    section: dict[str, Any] = {}
    for ours, key in _KEYS.items():
        device = getattr(offload, ours)
        if device == "none":
            continue
        other = theirs.get(key, {}).get("device", device)
        if other != device:
            raise ValueError(
                f"`policy.offload.{ours}` = {device}, but "
                f"`policy.deepspeed.zero_optimization.{key}.device` = {other}; remove the latter"
            )
        section[key] = {"device": device}
        if device == "nvme":
            section[key]["nvme_path"] = offload.nvme_path
    return section


def offload_devices(policy: PolicyConfig) -> dict[str, str]:
    """Return where "optimizer" and "parameters" are, each none, cpu or nvme, by our setting or by the user's
    DeepSpeed section.
    """
    theirs = policy.deepspeed.get("zero_optimization", {})
    ours = {name: getattr(policy.offload, name) for name in _KEYS}
    return {
        name: theirs.get(_KEYS[name], {}).get("device", "none") if device == "none" else device
        for name, device in ours.items()
    }


def optimizer_device(policy: PolicyConfig) -> str:
    """Return where the optimiser's state is, see `offload_devices`."""
    return offload_devices(policy)["optimizer"]


def size_buffers(settings: dict[str, Any], largest: int) -> None:
    """Make DeepSpeed's buffers for parameters on NVMe fit ``largest``, the elements of the largest one.

    Its default of 10^8 is too small for the embedding of a large vocabulary (the swap then fails), and takes
    gigabytes where all parameters are small.
    """
    section = settings["zero_optimization"].get("offload_param", {})
    if section.get("device") == "nvme":
        section.setdefault("buffer_size", largest)


def create_moments(optimizer: Any) -> None:
    """Give a new ZeRO-3 optimiser on NVMe the moments it would make at its first step. Call it before loading
    a checkpoint: DeepSpeed reads back only files of state it knows to be on disk, and else starts from none.
    """
    timers: set[str] = set()
    for number, weights in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer._prepare_sub_group(number, timers)
        state = optimizer.optimizer.state[weights]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(weights), exp_avg_sq=torch.zeros_like(weights))
        optimizer._release_sub_group(number, timers)


def set_steps(optimizer: Any, steps: int) -> None:
    """Set Adam's count of steps, on which its bias correction depends and which these files do not hold."""
    for state in optimizer.optimizer.state.values():
        state["step"] = steps


def check_offload(policy: PolicyConfig) -> None:
    """Raises ValueError when settings contradict each other or this machine lacks what offloading needs,
    before anything is started.
    """
    offload_config(policy)
    if optimizer_device(policy) != "none":
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler) is None:
            raise ValueError(
                "the optimiser on the CPU (`policy.offload.optimizer`): DeepSpeed compiles its Adam at first "
                f"use, and there is no C++ compiler {compiler!r} here; install g++, or set it to none"
            )
    if "nvme" in (policy.offload.optimizer, policy.offload.parameters):
        _check_nvme(policy.offload.nvme_path or "")


def _check_nvme(path: str) -> None:
    if not Path(path).is_dir() or not os.access(path, os.W_OK):
        raise ValueError(
            f"`policy.offload.nvme_path` = {path}: expected a directory that can be written, on a local NVMe "
            "disk of every node with policy ranks; make it, or name another"
        )
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        raise ValueError(
            "`policy.offload` = nvme: DeepSpeed's asynchronous file access cannot be built, because libaio "
            "and its header are not found; install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, Red "
            "Hat), or name where they are in CFLAGS and LDFLAGS; or use cpu instead of nvme"
        )
