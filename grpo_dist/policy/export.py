"""Write a trained model in Hugging Face format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_dist.policy.lora import write_adapter
from grpo_dist.runtime.files import clear, publish


def write_model(
    model: Any,
    weights: dict[str, Tensor],
    low_rank: dict[str, Tensor],
    directory: Path,
    tokenizer_dir: str,
    trust_remote_code: bool,
) -> None:
    """Write ``weights`` of ``model`` (safetensors) with its tokenizer, and any ``low_rank`` adapters to
    `adapter`. The directory appears only when it is complete.
    """
    from transformers import AutoTokenizer

    partial = directory.with_name(f".{directory.name}.partial")
    clear(partial)
    model.config.use_cache = True  # off while training
    model.save_pretrained(partial, state_dict=weights, safe_serialization=True)
    model.config.use_cache = False
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, trust_remote_code=trust_remote_code)
    tokenizer.save_pretrained(partial)
    if low_rank:
        write_adapter(model, low_rank, partial / "adapter", base_model=tokenizer_dir)
    if directory.exists():
        shutil.rmtree(directory)
    publish(partial, directory)
