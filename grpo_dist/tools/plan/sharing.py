"""The memory of roles that take turns on the policy's GPUs.

    engines' turn        engine                                     + what each sleeper keeps
    a reward model's     its whole copy and a forward pass          + what each sleeper keeps
    the reference's      its whole copy and a forward pass          + what each sleeper keeps
    the policy's         as on GPUs of its own                      + what each sleeper keeps
    weight sync          the policy's weights, the engine's weights, two buffers; two more where engines on
                         GPUs of their own may join, which get the weights in a transfer of their own
    refresh              the policy's weights, the reference's, two buffers, and those of the weight sync

Between their turns, the policy's states and a copy of the reference and of each reward model for each GPU are
in host memory. Engines keep nothing there: they drop their weights, and the policy sends them again. The
buffers of the weight sync stay on the GPU, where the engines have mapped them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from grpo_dist.config import PolicyConfig, ReferenceConfig, WeightSyncConfig
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.memory import ASLEEP, GPU_RUNTIME, Footprint, Sizes, states
from grpo_dist.tools.plan.models import ModelShape

SYNC, REFRESH = "weight sync", "reference refresh"
# What a process that only computes forward passes keeps on its GPU: its context and its kernels.
_FORWARD_ASLEEP = GIB * 3 // 4
_BUCKET_MB = 256  # `weight_sync.bucket_mb` on GPUs, MiB


def asleep(role: str, sharing: Collection[str]) -> int:
    """Return the bytes that the other roles of ``sharing`` keep on a GPU in the turn of ``role``."""
    if role not in sharing:
        return 0
    return sum(
        ASLEEP if other in ("policy", "rollout") else _FORWARD_ASLEEP for other in sharing if other != role
    )


def shared(
    policy: PolicyConfig,
    reference: ReferenceConfig,
    sync: WeightSyncConfig,
    model: ModelShape,
    sizes: Sizes,
    found: Mapping[str, Footprint],
    sharing: Collection[str],
    *,
    may_join: bool,
) -> dict[str, Footprint]:
    """Return ``found`` with what sleepers keep on the GPU, what each role keeps in host memory between its
    turns, and the moments in which two roles have weights there. ``may_join``: engines on other GPUs.
    """
    buffers = _buffers(policy, sync, model, sizes)
    made = {role: _in_turns(role, own, sharing, buffers) for role, own in found.items()}
    weights = states(policy, model, sizes)["weights"]
    contexts = {"runtime": GPU_RUNTIME, "asleep": asleep("policy", sharing)}
    whole = model.embedding * sizes.itemsize if policy.zero_stage == 3 else 0  # the largest parameter
    parts = {
        "policy's weights": weights,
        "engine's weights": found["rollout"].parts["weights"],
        "buckets": (2 if may_join else 1) * buffers,
        "gathered": whole,
    }
    made[SYNC] = Footprint(parts | contexts)
    if "reference" in sharing and reference.refresh_every:
        copy = found["reference"].parts["weights"]
        average = 4 * model.parameters if reference.refresh_mix < 1 and sizes.itemsize == 2 else 0
        parts = {"policy's weights": weights, "reference's weights": copy, "average": average}
        parts["buckets"] = 2 * buffers
        made[REFRESH] = Footprint(parts | contexts)
    return made


def _buffers(policy: PolicyConfig, sync: WeightSyncConfig, model: ModelShape, sizes: Sizes) -> int:
    """Return the bytes of a transfer's two buffers: each is a bucket, or the largest parameter."""
    only_adapters = policy.lora is not None and policy.lora.sync == "adapter"
    largest = 0 if only_adapters else model.embedding * sizes.itemsize
    return 2 * max((sync.bucket_mb or _BUCKET_MB) * 2**20, largest)


def _in_turns(role: str, own: Footprint, sharing: Collection[str], buffers: int) -> Footprint:
    if role not in sharing:
        return own
    kept = {"policy": ("weights", "gradients", "optimiser"), "rollout": ()}.get(role, ("weights",))
    moved = sum(own.parts[part] for part in kept)
    host = own.host | ({"between turns": moved} if moved else {})
    parts = own.parts if role == "rollout" else own.parts | {"asleep": asleep(role, sharing) + buffers}
    return replace(own, parts=parts, host=host)


def host_bytes(memory: Mapping[str, Footprint], workers: Mapping[str, int], *, per_node: int) -> int:
    """Return the most bytes of host memory that the workers of one node take, ``per_node`` of a role at most.
    The few GiB of each process itself are left out.
    """
    each = sum(
        sum(own.host.values()) * min(workers[role], per_node) for role, own in memory.items() if own.host
    )
    return each + sum(sum(own.host_first.values()) for own in memory.values())
