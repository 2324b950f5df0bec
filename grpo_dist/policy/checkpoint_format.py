"""A model's parameters as its checkpoint holds them.

transformers fuses and renames on loading. For Mixtral with E experts:

    checkpoint                                                    model
    block_sparse_moe.experts.{0..E-1}.w1.weight, w3.weight  ->    mlp.experts.gate_up_proj [E, 2I, H]
    block_sparse_moe.experts.{0..E-1}.w2.weight             ->    mlp.experts.down_proj [E, H, I]
    block_sparse_moe.gate.weight                            ->    mlp.gate.weight

The engine reads checkpoints, so the weight sync sends the left side. transformers' reverse conversion makes
it, one parameter at a time: under ZeRO-3 no rank holds the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.model_files import stored_tensors

_EXPERTS = re.compile(r"\bexperts\..*")
_SUPPORTED = "Qwen2-MoE, Qwen3-MoE and Mixtral work"


def keep_used_conversions(model: Any) -> None:
    """Drop the conversions that loading ``model`` did not need. transformers does so itself, but not under
    ZeRO-3; in reverse they would rename parameters that loading did not rename.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        model._weight_conversions = [c for c in conversions if c.was_used()]


class CheckpointFormat:
    """The checkpoint tensors of each parameter of ``model``. ``parameters``: all of them by name, in the
    order of the checkpoint tensors; only names, types and shapes count.

    Raises ValueError for a model whose checkpoint joins several parameters in one tensor.
    """

    def __init__(self, model: Any, parameters: Mapping[str, ParameterSpec]) -> None:
        self._model = model
        meta = {
            name: torch.empty(spec.shape, dtype=spec.torch_dtype, device="meta")
            for name, spec in parameters.items()
        }
        each = {name: self._revert({name: tensor}) for name, tensor in meta.items()}
        alone = {key: tensor.shape for tensors in each.values() for key, tensor in tensors.items()}
        together = {key: tensor.shape for key, tensor in self._revert(meta).items()}
        if alone != together or len(alone) != sum(map(len, each.values())):
            joined = min(set(alone.items()) ^ set(together.items()), default=("?", ()))[0]
            raise ValueError(
                f"model {type(model).__name__}: its checkpoint joins several parameters in one tensor "
                f"({joined}), which the weight sync cannot send; use another architecture"
            )
        self._renamed = {
            name: next(iter(tensors)) for name, tensors in each.items() if _is_only(tensors, meta[name])
        }
        self.specs = {
            name: [ParameterSpec.from_tensor(key, tensor) for key, tensor in tensors.items()]
            for name, tensors in each.items()
        }

    def tensors(self, name: str, value: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint tensors of parameter ``name`` with its whole ``value``: views or copies."""
        if name in self._renamed:
            return {self._renamed[name]: value}
        return self._revert({name: value})

    def _revert(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, tensors)


def _is_only(tensors: Mapping[str, Tensor], value: Tensor) -> bool:
    """Return whether ``tensors`` are ``value`` alone, under any name."""
    return len(tensors) == 1 and next(iter(tensors.values())) is value


def owners(specs: Mapping[str, Iterable[ParameterSpec]]) -> dict[str, str]:
    """Return the parameter that each checkpoint tensor comes from."""
    return {spec.name: name for name, tensors in specs.items() for spec in tensors}


def check_expert_names(model: Any, model_dir: Path) -> None:
    """Raise ValueError for a ``model`` (transformers, without weights) whose experts have other names in the
    files of ``model_dir`` than in a weight sync. Checks safetensors files only.
    """
    stored = {kind: name for name in stored_tensors(model_dir) if (kind := _kind(name))}
    each = {kind: (name, p) for name, p in model.named_parameters() if (kind := _kind(name))}
    if not stored or not each:
        return
    for layer, (name, parameter) in each.items():
        form = CheckpointFormat(model, {name: ParameterSpec.from_tensor(name, parameter)})
        sent = {kind: spec.name for spec in form.specs[name] if (kind := _kind(spec.name))}
        unknown = sorted(key for kind, key in sent.items() if kind not in stored)
        if unknown and layer not in stored:
            raise ValueError(
                f"model {model_dir}: its architecture {model.config.model_type} is a mixture of experts "
                f"whose weights have other names or another format in the checkpoint "
                f"({min(stored.values())}) than in a weight sync ({unknown[0]}), so that the engine cannot "
                f"load them; use another checkpoint or model ({_SUPPORTED})"
            )


def _kind(name: str) -> str | None:
    """Return the name without layer and expert: experts.N.w1.weight; None if it is not an expert's."""
    match = _EXPERTS.search(name)
    return re.sub(r"\.\d+\.", ".N.", match[0]) if match else None
