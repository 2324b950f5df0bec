"""Low-rank adapters (peft) on the policy: trained parameters, merging into a checkpoint's weights, and the
adapter that a run starts from.

    y = W x + scale B A x        A [rank, in], B [out, rank], scale = alpha / rank; W is frozen

peft renames what it wraps: `...q_proj.weight` becomes `...q_proj.base_layer.weight`, with
`...q_proj.lora_A.default.weight` next to it. Everything outside this module sees the checkpoint's names, and
for adapters the names in peft's files, `...q_proj.lora_A.weight`.

peft's dropout is left out on purpose: the engine has none, so its log-probs would differ from the trainer's,
and a step's gradient would depend on how it is split.

`model.adapter` names an adapter to start from. Without `policy.lora` it is merged into a copy of its base
model, and all weights are trained. With `policy.lora` its training continues: the model's directory then has
the adapter beside links to the base's files,

    model.safetensors -> .../Qwen3-4B/model.safetensors
    start_adapter/    the adapter
    base_model.json   where its base is

so that engines start from the base, as sync and export expect, and policy and reference from the adapter.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_dist.config import LoRAConfig
from grpo_dist.runtime.files import read_json
from grpo_dist.runtime.model_files import (
    ADAPTER_CONFIG,
    StoredTensor,
    cached,
    fingerprint,
    read_header,
    stored_tensors,
    weight_files,
)

BASE = "base_model.json"
_ADAPTER = "default"
_START = "start"  # adapter with the initial values, see `start_from`
_A, _B = ".lora_A.weight", ".lora_B.weight"
_VERSION = 2  # file format; raise it when the files that this module writes change
_FOLDER = "start_adapter"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Settings of peft's LoraConfig under which an adapter is more than scale B A in linear layers.
_UNSUPPORTED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern",
    "alpha_pattern", "layer_replication", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "velora_config", "monteclora_config", "kasa_config", "arrow_config",
)  # fmt: skip
# First characters of values of init_lora_weights that take the adapter's initial values out of the base.
_MOVES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken",
    "chat_template.*", "tekken.json", "*.spm",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Adapter:
    """``a`` [rank, in] and ``b`` [out, rank] of one weight [out, in]."""

    a: Tensor
    b: Tensor

    def merged_into(self, weight: Tensor, scale: float) -> Tensor:
        """Return ``weight`` + scale b a, computed in float32, in the type of ``weight``."""
        change = self.b.detach().float() @ self.a.detach().float()
        return torch.add(weight.float(), change, alpha=scale).to(weight.dtype)


def add_adapters(model: Any, settings: LoRAConfig, *, seed: int) -> None:
    """Wrap the target layers of ``model`` in place and freeze all else. A is drawn from ``seed``, the same on
    every rank and at every ZeRO stage; B is 0, so that the model starts unchanged.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = settings.target_modules
    named: Any = targets if isinstance(targets, str) else list(targets)
    holder = model
    if holds_fused_experts(model):
        # In a transformers model peft maps gate_proj, up_proj and down_proj (part of all-linear) to the fused
        # experts, and adapts those and the router, too. In a plain module it takes full names literally.
        full = {name for name in _adaptable(model) if isinstance(targets, str) or _matches(name, targets)}
        named, holder = sorted(full), nn.Module()
        holder.add_module("adapted", model)
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=named, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, holder, _ADAPTER)
    model.peft_config = holder.peft_config
    unknown = set(adapters(adapter_parameters(model))) - {name for name, _ in base_weights(model)}
    if unknown:
        raise ValueError(
            f"`policy.lora.target_modules`: {min(unknown)} is no weight of a linear layer of the model; name "
            "other layers"
        )


def holds_fused_experts(model: nn.Module) -> bool:
    """Return whether transformers fuses a layer's experts in one parameter, which is not a linear layer."""
    return any(name.rpartition(".")[0].endswith(".experts") for name, _ in model.named_parameters())


def _adaptable(model: Any) -> dict[str, nn.Module]:
    """Return the linear layers by name, all but the LM head."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
    }


def _matches(name: str, targets: Iterable[str]) -> bool:
    """Return whether peft adapts the module ``name``: a target equals it, or its end after a dot."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def check_targets(model_dir: Path, settings: LoRAConfig, *, trust_remote_code: bool) -> None:
    """Raise ValueError if `policy.lora.target_modules` names layers that the model lacks or that cannot be
    adapted. Reads no weights.
    """
    model = empty_model(model_dir, trust_remote_code=trust_remote_code)
    adaptable = _adaptable(model)
    choices = ", ".join(sorted({name.rpartition(".")[2] for name in adaptable}))
    names = () if isinstance(settings.target_modules, str) else settings.target_modules
    if not adaptable:
        raise ValueError(f"`policy.lora`: {model_dir.name} has no linear layers to adapt; remove it")
    for target in names:
        matches = {name for name, _ in model.named_modules() if _matches(name, [target])}
        if not matches:
            raise ValueError(
                f"`policy.lora.target_modules` = {target}: {model_dir.name} has no such layer; expected "
                f"all-linear or names among: {choices}"
            )
        if foreign := matches - set(adaptable):
            raise ValueError(
                f"`policy.lora.target_modules` = {target}: {min(foreign)} is no linear layer inside the "
                "model (embeddings and the LM head have no adapters: tied ones would be merged twice); "
                f"remove it, or train all weights with policy.lora=null; expected names among: {choices}"
            )


def empty_model(model_dir: Path | str, *, trust_remote_code: bool) -> Any:
    """Return the model without its weights, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def base_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name as in the checkpoint, tensor) of all that a checkpoint has: parameters, each once, without
    adapters, and buffers, such as the expert selection bias of GLM-4-MoE and DeepSeek.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if not _is_adapter(name)]
    return [(name.replace(".base_layer.", "."), t) for name, t in (*parameters, *_stored_buffers(model))]


def _stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def adapter_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name as in peft's files, parameter) of the adapters, if there are any."""
    return [
        (name.replace(f".{_ADAPTER}.weight", ".weight"), p)
        for name, p in model.named_parameters()
        if _is_adapter(name) and name.endswith(f".{_ADAPTER}.weight")
    ]


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def adapters(named: Iterable[tuple[str, Tensor]]) -> dict[str, Adapter]:
    """Return adapters by the checkpoint's name of the weight they change, from their named tensors."""
    tensors = dict(named)
    return {
        name.removesuffix(_A) + ".weight": Adapter(a, tensors[name.removesuffix(_A) + _B])
        for name, a in tensors.items()
        if name.endswith(_A)
    }


def start_from(model: Any, values: Mapping[str, Adapter]) -> None:
    """Set the adapters of ``model`` to ``values``, by the weight they change, and keep a frozen copy for
    `untrained`.
    """
    for name, layer in _adapted_layers(model):
        adapter, config = values[f"{name}.weight"], model.peft_config[_ADAPTER]
        layer.update_layer(_START, layer.r[_ADAPTER], layer.lora_alpha[_ADAPTER], config=config)
        for side, value in ((layer.lora_A, adapter.a), (layer.lora_B, adapter.b)):
            side[_START].requires_grad_(False)
            for key in (_ADAPTER, _START):
                side[key].weight.data.copy_(value)


def _adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


@contextmanager
def untrained(model: nn.Module) -> Iterator[None]:
    """Compute with the initial weights inside the block: the checkpoint's alone, or with the adapters of
    `start_from`.
    """
    layers = [layer for _, layer in _adapted_layers(model)]
    # peft's methods would also change `requires_grad`, and DeepSpeed has hooks on trained parameters.
    for layer in layers:
        layer._active_adapter = _START
        layer._disable_adapters = _START not in layer.lora_A
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = [_ADAPTER], False


def merged_weights(
    weights: Iterable[tuple[str, Tensor]], low_rank: Mapping[str, Adapter], scale: float, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's ``weights`` with the adapters merged. ``dtype``: the model's, as in the trainer.
    Raises RuntimeError after the last weight if an adapter's weight is missing.
    """
    left = set(low_rank)
    for name, weight in weights:
        adapter = low_rank.get(name)
        if adapter is None:
            yield name, weight
            continue
        left.discard(name)
        yield name, adapter.merged_into(weight.to(adapter.a.device, dtype), scale)
    if left:
        raise RuntimeError(
            f"weight sync: the engine's checkpoint has no {min(left)} ({len(left)} such); its names differ "
            "from the trainer's: use policy.lora.sync=merged"
        )


def write_adapter(
    model: Any, tensors: Mapping[str, Tensor], directory: Path, *, base_model: str, decoder: str = ""
) -> None:
    """Write only the adapter, in peft's format. ``base_model``: the model that it adapts. ``decoder``:
    replaces `model.` in names if ``base_model`` wraps the trained model; "": it is the trained model.
    """
    from safetensors.torch import save_file

    config = model.peft_config[_ADAPTER]
    config.base_model_name_or_path, config.inference_mode = base_model, True
    if decoder:
        tensors = {name.replace("model.", decoder, 1): tensor for name, tensor in tensors.items()}
        # Full names, because a tower may have layers of the same names.
        config.target_modules = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    config.save_pretrained(directory)
    whole = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "adapter_model.safetensors", metadata={"format": "pt"})


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
        """Scale times rank, even if the scale is alpha / sqrt(rank)."""
        alpha = float(self.settings["lora_alpha"])
        return alpha * sqrt(self.rank) if self.settings.get("use_rslora") else alpha

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapters(self) -> dict[str, Adapter]:
        """Read the values and return their `lora.adapters`."""
        from safetensors import safe_open

        (file,) = {tensor.file for tensor in self.stored.values()}
        with safe_open(file, framework="pt") as opened:
            return adapters((_plain(name), opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118


def apply_start_adapter(base: Path, adapter: Path, where: str, *, continued: bool) -> Path:
    """Return a cached directory of the model ``base`` that starts from ``adapter``: with the adapter in it if
    it is ``continued``, else merged. The adapter's tokenizer, if any, replaces the base's.

    Args:
        where: the key and its value, for messages: ``model.adapter = some/adapter``.

    Raises:
        ValueError: ``adapter`` is not a LoRA adapter of ``base``, or cannot be used.
    """
    start = _read(adapter, where)
    if problem := _misfit(start, stored_tensors(base)):
        raise ValueError(f"{where}: {problem}")
    cache_key = {
        "version": _VERSION, "base": str(base), "files": fingerprint(base), "continued": continued,
        "adapter": [fingerprint(adapter / name) for name in (ADAPTER_CONFIG, _ADAPTER_WEIGHTS)],
        "tokenizer": [fingerprint(file) for file in _tokenizer_files(adapter)],
    }  # fmt: skip

    def write(directory: Path) -> None:
        _link_base(base, adapter, directory, with_weights=continued)
        if continued:
            _write_beside(adapter, directory / _FOLDER)
            record_base(directory, base)
        else:
            _write_merged(base, start, directory)

    return cached(f"adapted-{base.name}", cache_key, write)


def find_start_adapter(model_dir: Path) -> StartAdapter | None:
    """Return the adapter from which training in ``model_dir`` starts; None: it starts from the model."""
    folder = model_dir / _FOLDER
    return _read(folder, str(folder)) if folder.is_dir() else None


def find_base_model(model_dir: Path) -> str:
    """Return the directory of the model that has the weights of ``model_dir``."""
    note = model_dir / BASE
    return str(read_json(note)) if note.is_file() else str(model_dir)


def record_base(directory: Path, model_dir: Path) -> None:
    """Record for `find_base_model` that ``directory`` has the weights of ``model_dir``."""
    (directory / BASE).write_text(json.dumps(find_base_model(model_dir)))


def check_continued(model_dir: Path, settings: LoRAConfig, *, trust_remote_code: bool) -> None:
    """Raise ValueError if ``settings`` do not match the adapter that ``model_dir`` starts from. Reads no
    weights.
    """
    start = find_start_adapter(model_dir)
    if start is None:
        return
    model = empty_model(model_dir, trust_remote_code=trust_remote_code)
    layers = {name.partition(".lora_")[0] for name in start.stored}
    ends = {layer.rpartition(".")[2] for layer in layers}
    # Where a layer of that name has no adapter, only full names adapt the same layers.
    targets = ends if {name for name in _adaptable(model) if _matches(name, ends)} == layers else layers
    remedy = (
        f"set policy.lora={{rank: {start.rank}, alpha: {start.alpha!r}, target_modules: "
        f"[{', '.join(sorted(targets))}]}}, or remove `policy.lora`, which merges the adapter and trains all "
        "weights"
    )
    differ = (settings.rank, settings.scale) != (start.rank, start.scale)
    if differ:
        raise ValueError(
            f"`policy.lora` has rank {settings.rank} and alpha {settings.alpha!r}, and the adapter of "
            f"`model.adapter` rank {start.rank} and alpha {start.alpha!r}; {remedy}"
        )
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
    """Read the adapter in ``directory``. Raises ValueError if it is not a LoRA adapter in safetensors."""
    for name in (ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            raise ValueError(
                f"{where}: no {name} there; expected a LoRA adapter as peft's save_pretrained writes it"
            )
    try:
        settings = read_json(directory / ADAPTER_CONFIG)
        stored = read_header(directory / _ADAPTER_WEIGHTS)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(settings, dict) or not stored:
        raise ValueError(f"{where}: {ADAPTER_CONFIG} or {_ADAPTER_WEIGHTS} is empty; save the adapter again")
    return StartAdapter(settings, {_plain(name): tensor for name, tensor in stored.items()})


def _plain(name: str) -> str:
    """Return the name in `adapter_parameters` of a tensor in peft's files, also for a text model inside a
    wrapper.
    """
    name = name.removeprefix(_PREFIX)
    for inside in ("model.language_model.", "language_model.model."):
        if name.startswith(inside):
            return "model." + name.removeprefix(inside)
    return name


def _misfit(start: StartAdapter, base: Mapping[str, StoredTensor]) -> str:
    """Return why ``start`` cannot be used with the model that has the tensors ``base``; "": it can."""
    settings = start.settings
    if (kind := settings.get("peft_type")) != "LORA":
        return f"its peft_type is {kind}; expected LORA"
    foreign = [key for key in _UNSUPPORTED if settings.get(key)]
    if settings.get("bias", "none") != "none":
        foreign.append("bias")
    init = str(settings.get("init_lora_weights"))
    remedy = "merge it with peft (merge_and_unload, save_pretrained) and name the result as `model.path`"
    if foreign:
        key = foreign[0]
        return f"{key} = {settings[key]}, and only plain adapters of linear layers are used; {remedy}"
    if init.lower().startswith(_MOVES_BASE):
        return f"init_lora_weights = {init} changed the base weights, too; where it was trained, {remedy}"
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
    """Return the tokenizer's files beside the adapter; []: they are missing or incomplete."""
    files = sorted(file for file in adapter.iterdir() if any(map(file.match, _TOKENIZER)))
    whole = {"tokenizer.json", "tokenizer.model", "vocab.json"}
    return files if whole & {file.name for file in files} else []


def _link_base(base: Path, adapter: Path, target: Path, *, with_weights: bool) -> None:
    """Fill ``target`` with the contents of ``base``, and with the adapter's tokenizer if it has one."""
    tokenizer = _tokenizer_files(adapter)
    for entry in base.iterdir():
        if entry.suffix == ".safetensors" or entry.is_dir():
            if with_weights or entry.is_dir():
                (target / entry.name).symlink_to(entry.resolve())
        elif not (tokenizer and any(map(entry.match, _TOKENIZER))):
            shutil.copyfile(entry, target / entry.name)
    for file in tokenizer:
        shutil.copyfile(file, target / file.name)


def _write_beside(adapter: Path, folder: Path) -> None:
    folder.mkdir()
    for name in (ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
        shutil.copyfile(adapter / name, folder / name)


def _write_merged(base: Path, start: StartAdapter, target: Path) -> None:
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
        save_file(weights, target / file.name, metadata={"format": "pt"})
