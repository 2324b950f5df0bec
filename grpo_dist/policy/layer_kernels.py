"""The package liger-kernel's Triton kernels for a model's norms, rotary positions and gated activations, on
GPUs.

torch computes each of them in several operations, which read and write the activations each time. On an H200
29,000 tokens of Qwen2.5-0.5B in bfloat16 take 0.31 s forward and backward with torch's operations and 0.25 s
with these kernels, 0.13 s of it matrix products (guides/gpus.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from grpo_dist.runtime.hardware import DeviceType, has_layer_kernels

# Model types whose values and gradients tests compare with torch's operations, and the activation that the
# kernel computes, whatever the model's configuration says.
_ACTIVATIONS = dict.fromkeys(
    (
        "exaone4", "granite", "hunyuan_v1_dense", "llama", "mistral", "olmo2", "olmo3", "qwen2", "qwen3",
        "smollm3",
    ),
    "silu",
) | {"gemma": "gelu_pytorch_tanh"}  # fmt: skip
_ROTARY = "apply_rotary_pos_emb"  # in transformers' module of a type


def kernels_problem(kernels: str, model: Any, device: DeviceType, *, has_package: bool) -> str | None:
    """Return why ``model`` (transformers) cannot compute with the kernels that `model.kernels` names; None if
    it can. ``has_package``: the workers have liger-kernel.
    """
    if kernels != "liger":
        return None
    if device != "cuda":
        problem = "computes on GPUs, and the run has none"
    elif not has_package:
        problem = "needs the package liger-kernel, which is not installed (`pip install liger-kernel`)"
    elif not _is_supported(model):
        types = ", ".join(sorted(_ACTIVATIONS))
        problem = (
            f"is for transformers' models of type {types} with their usual activation, and this is a "
            f"{type(model).__name__} of type {model.config.model_type} with {_activation(model)}"
        )
    else:
        return None
    return f"`model.kernels` = liger {problem}; use model.kernels=auto"


def use_kernels(model: Any, kernels: str, device: DeviceType) -> bool:
    """Make ``model`` (transformers) use the ``kernels`` that `model.kernels` names; return whether these are
    the package's. ``auto``: the package's, given a GPU, the package and a supported model type.

    Raises ValueError as `kernels_problem` says.
    """
    if problem := kernels_problem(kernels, model, device, has_package=has_layer_kernels()):
        raise ValueError(problem)
    if kernels == "torch" or device != "cuda" or not has_layer_kernels() or not _is_supported(model):
        return False
    replace_operations(model)
    return True


def replace_operations(model: Any) -> None:
    """Replace torch's operations in ``model`` by the package's kernels. The LM head is unchanged: this
    project computes its log-probs.

    Other models are untouched except for rotary positions: on a GPU, all models of the type in this process
    use the kernel.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance  # imports Triton

    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)
    # Undo the package's replacement of classes, which later models use and which may not suit them.
    for name, original in before.items():
        if getattr(module, name) is not original:
            is_first = name == _ROTARY and not isinstance(original, _Rotary)
            setattr(module, name, _Rotary(original) if is_first else original)


class _Rotary:
    """Computes ``by_torch``, transformers' function, by the kernel for tensors on a GPU."""

    def __init__(self, by_torch: Callable[..., Any]) -> None:
        from liger_kernel.ops.rope import LigerRopeFunction  # Triton's: the package has others, too

        self._by_torch, self._by_kernel = by_torch, LigerRopeFunction.apply

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *how: Any, **named: Any) -> Any:
        if has_kernels(q):
            return self._by_kernel(q, k, cos, sin)
        return self._by_torch(q, k, cos, sin, *how, **named)


def has_kernels(tensor: Tensor) -> bool:
    """Return whether kernels can compute with ``tensor``: models without weights are on no device."""
    return tensor.is_cuda


def _is_supported(model: Any) -> bool:
    """Return whether the kernels fit ``model``; classes outside transformers may differ under one type."""
    ours = type(model).__module__.startswith("transformers.models.")
    return ours and _ACTIVATIONS.get(model.config.model_type, "") == _activation(model)


def _activation(model: Any) -> str | None:
    return getattr(model.config, "hidden_act", None)
