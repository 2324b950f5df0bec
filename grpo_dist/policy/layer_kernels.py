"""Norms, rotary positions and gated activations of a model by the Triton kernels of the package liger-kernel,
on GPUs.

torch computes each of them in several operations, which read and write the activations each time. On an H200
29,000 tokens of Qwen2.5-0.5B in bfloat16 take 0.31 s forward and backward by torch's operations and 0.25 by
these kernels, of which 0.13 are matrix products (guides/gpu_check.md).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from grpo_dist.runtime.hardware import DeviceType

# Types of models whose values and gradients tests compare with those of torch's operations, and the
# activation that their kernel computes, whatever the model's configuration says.
_ACTIVATIONS = dict.fromkeys(
    (
        "exaone4", "granite", "hunyuan_v1_dense", "llama", "mistral", "olmo2", "olmo3", "qwen2", "qwen3",
        "smollm3",
    ),
    "silu",
) | {"gemma": "gelu_pytorch_tanh"}  # fmt: skip


def kernels_problem(kernels: str, config: Any, device: DeviceType) -> str | None:
    """Return why a model of this ``config`` (of its text) cannot have the ``kernels`` that `model.kernels`
    asks for; None where it can.
    """
    if kernels != "liger":
        return None
    if device != "cuda":
        problem = "computes on GPUs, and the run has none"
    elif not _installed():
        problem = "needs the package liger-kernel, which is not installed (`pip install liger-kernel`)"
    elif not _is_known(config):
        types = ", ".join(sorted(_ACTIVATIONS))
        problem = f"is for models of type {types} with their usual activation, and this is {_named(config)}"
    else:
        return None
    return f"`model.kernels` = liger {problem}; use model.kernels=auto"


def use_kernels(model: Any, kernels: str, device: DeviceType) -> bool:
    """Have ``model`` (transformers) compute with the ``kernels`` that `model.kernels` names; return whether
    these are the package's. ``auto``: where there is a GPU, the package, and a type of model that is known.

    Raises ValueError as `kernels_problem` says.
    """
    config = model.config.get_text_config()
    if problem := kernels_problem(kernels, config, device):
        raise ValueError(problem)
    if kernels == "torch" or device != "cuda" or not _installed() or not _is_known(config):
        return False
    replace_operations(model)
    return True


def replace_operations(model: Any) -> None:
    """Put the package's kernels in the place of torch's operations in ``model``. The LM head stays as it is:
    its log-probs are this project's. Rotary positions, and norms of models that are loaded later, change for
    all models of the type in this process.
    """
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance  # imports Triton

    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


def _installed() -> bool:
    return find_spec("liger_kernel") is not None


def _is_known(config: Any) -> bool:
    return _ACTIVATIONS.get(config.model_type) == _activation(config)


def _activation(config: Any) -> str | None:
    return getattr(config, "hidden_act", None)


def _named(config: Any) -> str:
    return f"{config.model_type} with {_activation(config)}"
