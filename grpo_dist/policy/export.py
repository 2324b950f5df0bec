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
    save_pretrained(model, partial, weights)
    model.config.use_cache = False
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, trust_remote_code=trust_remote_code)
    tokenizer.save_pretrained(partial)
    if low_rank:
        write_adapter(model, low_rank, partial / "adapter", base_model=tokenizer_dir)
    if directory.exists():
        shutil.rmtree(directory)
    publish(partial, directory)


def save_pretrained(model: Any, directory: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write ``model`` to ``directory`` with ``weights`` (None: its own), and its generation config as it is.

    transformers loads a generation config such as `{"temperature": 0.6}`, without `do_sample`, with a
    warning, but refuses to save it. Nothing here samples with it, so that is no reason to lose a model.
    """
    from transformers import GenerationConfig  # slow to import
    from transformers.utils import GENERATION_CONFIG_NAME  # slow to import

    own = model.generation_config if model.can_generate() else None
    try:
        if own is not None:
            model.generation_config = GenerationConfig()
        model.save_pretrained(directory, state_dict=weights, safe_serialization=True)
    finally:
        if own is not None:
            model.generation_config = own
    if own is not None:
        own.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])
