"""DeepSpeed's engine around the policy's model, and a gate for its steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from grpo_dist.config import PolicyConfig
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.runtime.hardware import device_type

# What measures the gradient norm in each of DeepSpeed's optimizers: a method, or a function of its module. A
# returned list has the norms of parameter groups.
_METHODS = {
    "DeepSpeedZeroOptimizer": "scaled_global_norm",
    "DeepSpeedZeroOptimizer_Stage3": "_get_norm_groups",
}
_FUNCTIONS = {"BF16_Optimizer": "get_global_norm_of_tensors"}


def zero3_loading(settings: dict[str, Any]) -> Any:
    """Make transformers load straight into ZeRO-3's partitions, as long as the returned object lives."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(settings)


def initialize(module: TokenLogprobs, policy: PolicyConfig, settings: dict[str, Any]) -> Any:
    """Return the engine, with the optimiser of ``policy``. Collective."""
    import deepspeed  # optional: only ranks need it

    deepspeed.utils.logger.setLevel("WARNING")
    if device_type() == "cuda":
        measure_memory_by_torch()
    o = policy.optimizer
    arguments: dict[str, Any] = {"lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay}
    parameters = [p for p in module.parameters() if p.requires_grad]
    if policy.offload.optimizer != "none":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(parameters, adamw_mode=True, **arguments)
    elif o.name == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit  # optional

        optimizer = AdamW8bit(parameters, **arguments)
    else:
        optimizer = torch.optim.AdamW(parameters, fused=True, **arguments)
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=settings, dist_init_required=False
    )
    engine.train()
    if device_type() == "cuda" and hasattr(engine.optimizer, "_record_gradient_stream"):
        # ZeRO-1 and 2 with overlap_comm reduce a gradient above the bucket size in place, on another stream
        # than the backward pass, which frees it at once. DeepSpeed tells the allocator only with offload.
        engine.optimizer._record_gradient_stream = torch.Tensor.record_stream
    if policy.zero_stage == 0 and dist.get_world_size() == 1:
        # DeepSpeed would copy all gradients into one tensor, reduce it over one rank, and copy them back.
        engine._reduce_non_expert_gradients = lambda *_: None
    return engine


def measure_memory_by_torch() -> None:
    """Make DeepSpeed ask torch for the free memory of its GPU. It asks NVML by the numbers in
    CUDA_VISIBLE_DEVICES, and fails if GPUs, or parts of them (MIG), have UUIDs there.
    """
    from deepspeed.accelerator import get_accelerator  # with DeepSpeed, above

    accelerator = get_accelerator()
    accelerator.available_memory = lambda device=None: torch.cuda.mem_get_info(device)[0]


@contextmanager
def forward_only(engine: Any) -> Iterator[None]:
    """Run forward passes of ``engine`` that no backward pass follows.

    The last module of a forward pass under ZeRO-3 starts to fetch the weights that the backward pass needs
    first. They would stay in flight until the next forward pass, and a gather of them between the two fails.
    """
    with torch.no_grad():
        yield
    if engine.zero_optimization_partition_weights():
        engine.optimizer.empty_partition_cache()


class NormGate:
    """Skips the steps of a DeepSpeed optimizer whose gradient norm is above ``limit``. One per optimizer.

    DeepSpeed itself skips a step whose gradient norm is not a number, on all ranks and with everything
    cleared, whatever the ZeRO stage and wherever its states are. The gate makes the norm NaN to skip a step
    whose gradient is finite. ``norm``: the last one measured, the same on all ranks, NaN where not finite.
    """

    def __init__(self, optimizer: Any) -> None:
        self.limit, self.norm = math.inf, math.nan
        kind = type(optimizer)
        name = _METHODS.get(kind.__name__) or _FUNCTIONS[kind.__name__]
        owner = optimizer if kind.__name__ in _METHODS else sys.modules[kind.__module__]
        measure = getattr(owner, name)

        def gated(*arguments: Any, **others: Any) -> Any:
            measured = measure(*arguments, **others)
            norms = measured if isinstance(measured, list) else [measured]
            self.norm = _total_norm([float(norm) for norm in norms])
            if self.norm <= self.limit:
                return measured
            refused = [norm * math.nan for norm in norms]
            return refused if isinstance(measured, list) else refused[0]

        setattr(owner, name, gated)


def _total_norm(norms: list[float]) -> float:
    """Return the norm over all groups; DeepSpeed reports -1 for a non-finite norm."""
    finite = all(math.isfinite(norm) and norm >= 0 for norm in norms)
    return math.hypot(*norms) if finite else math.nan
