"""Whether an actor sees the GPUs that it was given, and no others.

Ray counts GPUs, and gives an actor its own through CUDA_VISIBLE_DEVICES. Two variables of Ray change that
without a word: all ranks would compute on one GPU, or engines on the CPU.
"""

from __future__ import annotations

import os

import ray

from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import usable_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED = "GRPO_DIST_SHARED_GPUS"  # of an actor on GPUs that Ray gave to another: those that it is to see
# Ray leaves CUDA_VISIBLE_DEVICES as it is. verl and OpenRLHF have their users set it.
NOT_SET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
# Ray empties CUDA_VISIBLE_DEVICES of actors that it gave no GPU, such as those that share one.
EMPTIED = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"


def check_gpus() -> None:
    """Check that this process sees the GPUs that Ray or the reservation gave it. Called before CUDA starts.
    No effect in an actor without GPUs, or outside of Ray.

    Raises UserError with the variable that is in the way and the remedy.
    """
    shared = os.environ.get(SHARED)
    expected = shared.split(",") if shared else _given_by_ray()
    if not expected:
        return
    usable = usable_gpus()
    seen = os.environ.get(VISIBLE)
    visible = [str(i) for i in range(usable)] if seen is None else [name for name in seen.split(",") if name]
    if set(visible) == set(expected):
        return
    value = "not set" if seen is None else repr(seen)
    name = EMPTIED if shared else NOT_SET
    if os.environ.get(name, "").lower() in ("1", "true"):
        cause = f"{name}={os.environ[name]} has Ray {'empty it' if shared else 'leave it alone'}; unset that"
    else:
        cause = "something but Ray has set it; remove that"
    assigned = f"GPU {', '.join(sorted(expected))} of {ray.util.get_node_ip_address()}"
    raise UserError(
        f"this worker has {assigned}, and {VISIBLE} is {value}, so that it would compute elsewhere: {cause}, "
        "also where Ray is started on the nodes, and restart Ray"
    )


def _given_by_ray() -> list[str]:
    if not ray.is_initialized():
        return []
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))
