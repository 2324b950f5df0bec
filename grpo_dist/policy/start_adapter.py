"""A LoRA adapter, as peft writes it, from which a run starts.

Without `policy.lora` it is merged into a copy of the model that it adapts, and all weights are trained. With
`policy.lora` it is trained on: the model's directory then has the adapter beside links to the base's files,

    model.safetensors -> .../Qwen3-4B/model.safetensors
    start_adapter/    the adapter, and where its base is

so that engines start from the base, as sync and export count on, and policy and reference from the adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_dist.config import LoRAConfig
from grpo_dist.policy.lora import (
    Adapter,
    adapter_parameters,
    adapters,
    add_adapters,
    base_weights,
    empty_model,
)
from grpo_dist.runtime.cache import cached, fingerprint
from grpo_dist.runtime.json_files import read_json
from grpo_dist.runtime.model_files import (
    ADAPTER_CONFIG,
    StoredTensor,
    read_header,
    stored_tensors,
    weight_files,
)

_VERSION = 1  # of the files this module writes; raise it when they change
_FOLDER, _BASE = "start_adapter", "base.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of peft's LoraConfig under which an adapter is more than scale B A in linear layers.
_FOREIGN = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern",
    "alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "velora_config", "monteclora_config", "kasa_config", "arrow_config",
)  # fmt: skip
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken",
    "chat_template.*", "tekken.json", "*.spm",
)  # fmt: skip


@dataclass(frozen=True)
class StartAdapter:
    """An adapter in files. ``stored``: A and B by the names of `adapter_parameters`."""

    settings: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]

    @property
    def rank(self) -> int:
        return int(self.settings["r"])

    @property
    def alpha(self) -> float:
        """What scale times rank is, also where the scale is alpha / sqrt(rank)."""
        alpha = float(self.settings["lora_alpha"])
        return alpha * sqrt(self.rank) if self.settings.get("use_rslora") else alpha

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapters(self) -> dict[str, Adapter]:
        """Return `lora.adapters` of the values."""
        from safetensors import safe_open

        (file,) = {tensor.file for tensor in self.stored.values()}
        with safe_open(file, framework="pt") as opened:
            return adapters((_plain(name), opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118


def with_adapter(base: Path, adapter: Path, where: str, *, continued: bool) -> Path:
    """Return the directory of the model ``base`` that starts from ``adapter``, cached: with the adapter in
    it where that is ``continued``, else merged. A tokenizer of the adapter takes the place of the base's.

    Args:
        where: the key and its value, for messages: ``model.adapter = some/adapter``.

    Raises:
        ValueError: ``adapter`` is no LoRA adapter of ``base``, or one that cannot be used.
    """
    start = _read(adapter, where)
    if problem := _misfit(start, stored_tensors(base)):
        raise ValueError(f"{where}: {problem}")
    decides = {
        "version": _VERSION, "base": str(base), "files": fingerprint(base), "continued": continued,
        "adapter": [fingerprint(adapter / name) for name in (ADAPTER_CONFIG, _WEIGHTS)],
        "tokenizer": [fingerprint(file) for file in _tokenizer_files(adapter)],
    }  # fmt: skip

    def write(made: Path) -> None:
        _link_base(base, adapter, made, with_weights=continued)
        if continued:
            _write_beside(base, adapter, made / _FOLDER)
        else:
            _write_merged(base, start, made)

    return cached(f"adapted-{base.name}", decides, write)


def adapter_in(model_dir: Path) -> StartAdapter | None:
    """Return the adapter from which training in ``model_dir`` starts; None: from the model itself."""
    folder = model_dir / _FOLDER
    return _read(folder, str(folder)) if folder.is_dir() else None


def base_of(model_dir: Path) -> str:
    """Return the directory of the model itself."""
    note = model_dir / _FOLDER / _BASE
    return str(read_json(note)) if note.is_file() else str(model_dir)


def check_continued(model_dir: Path, settings: LoRAConfig, *, trust_remote_code: bool) -> None:
    """Raise ValueError where the adapters of ``settings`` are others than the one that ``model_dir`` starts
    from. Reads no weights.
    """
    start = adapter_in(model_dir)
    if start is None:
        return
    targets = start.settings.get("target_modules")
    named = targets if isinstance(targets, str) else "[" + ", ".join(sorted(targets or ())) + "]"
    remedy = (
        f"set policy.lora={{rank: {start.rank}, alpha: {start.alpha:g}, target_modules: {named}}}, or remove "
        "`policy.lora`, which merges the adapter and trains all weights"
    )
    differ = (settings.rank, settings.scale) != (start.rank, start.scale)
    if differ:
        raise ValueError(
            f"`policy.lora` has rank {settings.rank} and alpha {settings.alpha:g}, and the adapter of "
            f"`model.adapter` rank {start.rank} and alpha {start.alpha:g}; {remedy}"
        )
    model = empty_model(model_dir, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        add_adapters(model, settings, seed=0)
    names = {name for name, _ in adapter_parameters(model)}
    if other := sorted(names ^ set(start.stored)):
        side = "the adapter of `model.adapter` has no" if other[0] in names else "`policy.lora` adapts no"
        raise ValueError(f"`policy.lora.target_modules`: {side} {other[0].partition('.lora_')[0]}; {remedy}")


def merge_start(model: nn.Module, start: StartAdapter) -> None:
    """Merge ``start`` into the weights of ``model``, in place."""
    weights = dict(base_weights(model))
    for name, adapter in start.adapters().items():
        weights[name].data.copy_(adapter.merged_into(weights[name].data, start.scale))


def _read(directory: Path, where: str) -> StartAdapter:
    """Raises ValueError for what is no LoRA adapter in safetensors."""
    for name in (ADAPTER_CONFIG, _WEIGHTS):
        if not (directory / name).is_file():
            raise ValueError(
                f"{where}: no {name} there; expected a LoRA adapter as peft's save_pretrained writes it"
            )
    try:
        settings = read_json(directory / ADAPTER_CONFIG)
        stored = read_header(directory / _WEIGHTS)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(settings, dict) or not stored:
        raise ValueError(f"{where}: {ADAPTER_CONFIG} or {_WEIGHTS} is empty; save the adapter again")
    return StartAdapter(settings, {_plain(name): tensor for name, tensor in stored.items()})


def _plain(name: str) -> str:
    """Return the name in `adapter_parameters` of a tensor in peft's files, also of one that adapts a text
    model inside its wrapper.
    """
    name = name.removeprefix(_PREFIX)
    for inside in ("model.language_model.", "language_model.model."):
        if name.startswith(inside):
            return "model." + name.removeprefix(inside)
    return name


def _misfit(start: StartAdapter, base: Mapping[str, StoredTensor]) -> str:
    """Return why ``start`` cannot be used, or is none of the model with tensors ``base``; "": it can."""
    settings = start.settings
    if (kind := settings.get("peft_type")) != "LORA":
        return f"its peft_type is {kind}; expected LORA"
    foreign = [key for key in _FOREIGN if settings.get(key)]
    if settings.get("bias", "none") != "none":
        foreign.append("bias")
    remedy = "merge it with peft (merge_and_unload, save_pretrained) and name the result as `model.path`"
    if foreign:
        key = foreign[0]
        return f"{key} = {settings[key]}, and only plain adapters of linear layers are used; {remedy}"
    for name, tensor in start.stored.items():
        weight, _, side = name.rpartition(".lora_")
        if side not in ("A.weight", "B.weight") or weight == "lm_head":
            return (
                f"it has {name}, and only adapters of linear layers inside the model are used; {remedy}, but "
                "compare it with the adapted model: on tied embeddings peft merges once for each layer"
            )
        stored, axis = base.get(f"{weight}.weight"), 1 if side == "A.weight" else 0
        if stored is None or stored.shape[axis] != tensor.shape[axis]:
            size = "has no such weight" if stored is None else f"has {list(stored.shape)} there"
            return (
                f"it adapts {weight} {list(tensor.shape)}, and the model of `model.path` {size}; the base of "
                f"the adapter is {settings.get('base_model_name_or_path') or 'not named'}: use that"
            )
    return ""


def _tokenizer_files(adapter: Path) -> list[Path]:
    """Return the tokenizer's files beside the adapter; []: it has none, or not all."""
    files = sorted(file for file in adapter.iterdir() if any(map(file.match, _TOKENIZER)))
    whole = {"tokenizer.json", "tokenizer.model", "vocab.json"}
    return files if whole & {file.name for file in files} else []


def _link_base(base: Path, adapter: Path, made: Path, *, with_weights: bool) -> None:
    """Fill ``made`` with what lies in ``base``, with the tokenizer of the adapter if it has one."""
    tokenizer = _tokenizer_files(adapter)
    for entry in base.iterdir():
        if entry.suffix == ".safetensors" or entry.is_dir():
            if with_weights or entry.is_dir():
                (made / entry.name).symlink_to(entry.resolve())
        elif not (tokenizer and any(map(entry.match, _TOKENIZER))):
            shutil.copyfile(entry, made / entry.name)
    for file in tokenizer:
        shutil.copyfile(file, made / file.name)


def _write_beside(base: Path, adapter: Path, folder: Path) -> None:
    folder.mkdir()
    for name in (ADAPTER_CONFIG, _WEIGHTS):
        shutil.copyfile(adapter / name, folder / name)
    (folder / _BASE).write_text(json.dumps(str(base)))


def _write_merged(base: Path, start: StartAdapter, made: Path) -> None:
    """Write the weights of ``base`` with the adapter merged, file by file."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    low_rank = start.adapters()
    for file in weight_files(base):
        weights: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                weight = opened.get_tensor(name)
                if name in low_rank:
                    weight = low_rank[name].merged_into(weight, start.scale)
                weights[name] = weight
        save_file(weights, made / file.name, metadata={"format": "pt"})
