"""Check that an actor sees exactly the GPUs that it was assigned.

Ray assigns GPUs to an actor through CUDA_VISIBLE_DEVICES. Two Ray variables silently change that: all ranks
would compute on one GPU, or engines on the CPU.
"""

from __future__ import annotations

import os

import ray

from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import usable_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED = "GRPO_DIST_SHARED_GPUS"  # GPUs that a colocated actor should see; Ray assigned them to another actor
# Makes Ray leave CUDA_VISIBLE_DEVICES as it is. verl and OpenRLHF have their users set it.
NOT_SET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
# Makes Ray empty CUDA_VISIBLE_DEVICES of actors without assigned GPUs, such as colocated actors.
EMPTIED = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"


def check_gpus() -> None:
    """Check that this process sees its assigned GPUs. Call it before CUDA starts. No effect in an actor
    without GPUs, or outside of Ray.

    Raises UserError with the offending variable and the remedy.
    """
    shared = os.environ.get(SHARED)
    expected = shared.split(",") if shared else _read_ray_gpus()
    if not expected:
        return
    usable = usable_gpus()
    setting = os.environ.get(VISIBLE)
    visible = [str(i) for i in range(usable)] if setting is None else list(filter(None, setting.split(",")))
    if set(visible) == set(expected):
        return
    value = "not set" if setting is None else repr(setting)
    name = EMPTIED if shared else NOT_SET
    if os.environ.get(name, "").lower() in ("1", "true"):
        cause = f"{name}={os.environ[name]} has Ray {'empty it' if shared else 'leave it alone'}; unset that"
    else:
        cause = "something other than Ray has set it; remove that"
    assigned = f"GPU {', '.join(sorted(expected))} of {ray.util.get_node_ip_address()}"
    raise UserError(
        f"this worker has {assigned}, and {VISIBLE} is {value}, so that it would compute elsewhere: {cause}, "
        "also where Ray is started on the nodes, and restart Ray"
    )


def _read_ray_gpus() -> list[str]:
    if not ray.is_initialized():
        return []
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))
