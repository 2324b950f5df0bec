"""Whether the weight sync of a mixture of experts sends what its checkpoint holds. Reads no weights.

The engine loads the names of the checkpoint. For most architectures transformers knows how to turn its fused
experts back into those; for a checkpoint of another format (MXFP4 blocks of gpt-oss) it does not:

    checkpoint                                        the sync would send
    layers.0.mlp.experts.gate_up_proj_blocks          layers.0.mlp.experts.gate_up_proj
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from grpo_dist.policy.checkpoint_format import CheckpointFormat
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.model_files import stored_tensors

_EXPERTS = re.compile(r"\bexperts\..*")
_KNOWN = "Qwen2-MoE, Qwen3-MoE and Mixtral work"


def check_expert_names(model: Any, model_dir: Path) -> None:
    """Raise ValueError for a ``model`` (transformers, without weights) whose experts have other names in the
    files of ``model_dir`` than in a weight sync. Files other than safetensors are not looked at.
    """
    stored = {kind: name for name in stored_tensors(model_dir) if (kind := _kind(name))}
    each = {kind: (name, p) for name, p in model.named_parameters() if (kind := _kind(name))}
    if not stored or not each:
        return
    for own, (name, parameter) in each.items():
        form = CheckpointFormat(model, {name: ParameterSpec.of(name, parameter)})
        sent = {kind: spec.name for spec in form.specs[name] if (kind := _kind(spec.name))}
        unknown = sorted(key for kind, key in sent.items() if kind not in stored)
        if unknown and own not in stored:
            raise ValueError(
                f"model {model_dir}: its architecture {model.config.model_type} is a mixture of experts "
                f"whose weights have other names or another format in the checkpoint "
                f"({min(stored.values())}) than in a weight sync ({unknown[0]}), so that the engine cannot "
                f"load them; use another checkpoint or model ({_KNOWN})"
            )


def _kind(name: str) -> str | None:
    """Return the name without layer and expert: experts.N.w1.weight; None for what is no expert's."""
    found = _EXPERTS.search(name)
    return re.sub(r"\.\d+\.", ".N.", found[0]) if found else None
