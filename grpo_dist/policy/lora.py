"""Low-rank adapters (peft) on the policy: what trains, and how a checkpoint's weights follow from it.

    y = W x + scale B A x        A [rank, in], B [out, rank], scale = alpha / rank; W stays as it was loaded

peft renames what it wraps: `...q_proj.weight` becomes `...q_proj.base_layer.weight`, with
`...q_proj.lora_A.default.weight` next to it. Everything outside this module sees the checkpoint's names, and
for adapters the names of peft's own files, `...q_proj.lora_A.weight`.

peft's dropout is left out on purpose: the engine has none, so its log-probs would differ from the trainer's,
and a step's gradient would depend on how it is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_dist.config import LoRAConfig

_ADAPTER = "default"
_START = "start"  # the values from which training went on, see `start_from`
_A, _B = ".lora_A.weight", ".lora_B.weight"


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
        # For a transformers model peft takes gate_proj, up_proj and down_proj (which all-linear includes) for
        # the fused experts, and adapts those and the router, too. It reads full names in a plain module as
        # they stand.
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
    """Return whether transformers fuses the experts of a layer in one parameter, which is no linear layer."""
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
    """Raises ValueError when `policy.lora.target_modules` names what the model does not have or what cannot
    be adapted. Reads no weights.
    """
    model = empty_model(model_dir, trust_remote_code=trust_remote_code)
    adaptable = _adaptable(model)
    choices = ", ".join(sorted({name.rpartition(".")[2] for name in adaptable}))
    names = () if isinstance(settings.target_modules, str) else settings.target_modules
    if not adaptable:
        raise ValueError(f"`policy.lora`: {model_dir.name} has no linear layers to adapt; remove it")
    for target in names:
        found = {name for name, _ in model.named_modules() if _matches(name, [target])}
        if not found:
            raise ValueError(
                f"`policy.lora.target_modules` = {target}: {model_dir.name} has no such layer; expected "
                f"all-linear or names among: {choices}"
            )
        if foreign := found - set(adaptable):
            raise ValueError(
                f"`policy.lora.target_modules` = {target}: {min(foreign)} is no linear layer inside the "
                f"model (embeddings and the LM head stay as they are); use names among: {choices}"
            )


def empty_model(model_dir: Path | str, *, trust_remote_code: bool) -> Any:
    """Return the model without its weights, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def base_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name as in the checkpoint, tensor) of all that a checkpoint has: parameters, each once, without
    adapters, and buffers, such as the bias by which GLM-4-MoE and DeepSeek choose experts.
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
    """Give the adapters of ``model`` these ``values``, by the weight they change, and keep them beside what
    is trained, for `untrained`.
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
    """Compute with the weights that training started from inside the block: those of the checkpoint alone, or
    with the adapters of `start_from`.
    """
    layers = [layer for _, layer in _adapted_layers(model)]
    # peft's own switches change `requires_grad`, too, and DeepSpeed has hooks on what it trains.
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
    """Yield a checkpoint's ``weights`` with the adapters merged. ``dtype``: of the model, in which the
    trainer holds them too. Raises RuntimeError after the last one when the weight of an adapter is missing.
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
    """Write the adapter alone, as peft reads it. ``base_model``: the model that it adapts. ``decoder``: what
    stands for `model.` in the names of that model, which wraps the one that was trained; "": it is that one.
    """
    from safetensors.torch import save_file

    config = model.peft_config[_ADAPTER]
    config.base_model_name_or_path, config.inference_mode = base_model, True
    if decoder:
        tensors = {name.replace("model.", decoder, 1): tensor for name, tensor in tensors.items()}
        # In full, for a tower may have layers of the same names.
        config.target_modules = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
    config.save_pretrained(directory)
    whole = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, directory / "adapter_model.safetensors", metadata={"format": "pt"})
