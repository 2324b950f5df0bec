"""Builds small Qwen2 models with random weights from a seed; only `demo:smollm2` is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_dist.demo.smollm2 import NAME as SMOLLM2
from grpo_dist.demo.smollm2 import smollm2
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.runtime.model_files import cached

_VERSION = 2  # version of the written files; increment if they change
_SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},  # 0.8 M parameters
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6},  # 4.8 M parameters
    # 0.35 M parameters. Heads of size 32, the smallest that the engine's CPU kernels support.
    "micro": {
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
}


def cached_model(name: str, *, seed: int) -> Path:
    """Return the cached directory of model ``name``. Raises ValueError for an unknown name, or if `smollm2`
    cannot be downloaded.
    """
    if name == SMOLLM2:
        return smollm2()
    if name not in _SHAPES:
        names = ", ".join(f"demo:{n}" for n in (*_SHAPES, SMOLLM2))
        raise ValueError(f"model demo:{name}: no such model; expected one of {names}")
    decides = {"version": _VERSION, "name": name, "seed": seed}
    return cached(f"model-{name}", decides, lambda directory: _write(_SHAPES[name], seed, directory))


def is_toy(path: str) -> bool:
    """Return whether ``path`` names a model of random weights, which is created in a moment."""
    return path.startswith("demo:") and path.removeprefix("demo:") in _SHAPES


def random_model(file: Path, *, seed: int) -> Path:
    """Return the directory of a random model with the shape in ``file``, a Hugging Face config.json.

    Weights have the dtype of ``file``. The tokenizer is the character tokenizer, which is smaller than most
    vocabularies. Raises ValueError for an invalid file.
    """
    shape = _read_shape(file)
    decides = {"version": _VERSION, "shape": shape, "seed": seed}
    return cached(
        f"model-{file.stem}", decides, lambda directory: _write_random(shape, seed, directory, file)
    )


def _read_shape(file: Path) -> dict[str, Any]:
    what = f"model.path = random:{file}"
    if not file.is_file():
        raise ValueError(f"{what}: no such file; expected a Hugging Face config.json")
    try:
        shape = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{what}: not JSON: {error}") from error
    least = len(character_tokenizer(ascii_only=True))
    if not isinstance(shape, dict) or "model_type" not in shape or "vocab_size" not in shape:
        raise ValueError(f"{what}: expected an object with model_type, vocab_size and the sizes of that type")
    if type(shape["vocab_size"]) is not int or shape["vocab_size"] < least:
        raise ValueError(
            f"{what}: vocab_size = {shape['vocab_size']!r}; expected a whole number, at least "
            f"{least} for the tokenizer"
        )
    return shape


def _write_random(shape: dict[str, Any], seed: int, directory: Path, file: Path) -> None:
    # heavy: only when the model is not cached
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = character_tokenizer()
    if len(tokenizer) > shape["vocab_size"]:
        tokenizer = character_tokenizer(ascii_only=True)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    special["pad_token_id"] = tokenizer.pad_token_id
    settings = {name: value for name, value in shape.items() if name != "model_type"} | special
    try:
        config = AutoConfig.for_model(shape["model_type"], **settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=shape.get("dtype", "float32"))
    except Exception as error:  # for a bad shape, libraries may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"model.path = random:{file}: no causal language model can be made of it ({reason}); "
            "check model_type and the sizes"
        ) from error
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _write(shape: dict[str, int], seed: int, directory: Path) -> None:
    """Write a Hugging Face model directory, deterministically."""
    # heavy: only when the model is not cached
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = character_tokenizer()
    settings: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2} | shape
    config = Qwen2Config(
        **settings,
        vocab_size=272,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
