"""Loading weights into a running vLLM model: all of them, or the layers whose weights changed.

vLLM's layerwise reload fills a new layer, packs or quantises it, and copies the result to where the layer's
weights were. It needs every checkpoint tensor of a layer at once: a changed q_proj is loaded with the k_proj
and v_proj that vLLM fuses it with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from grpo_dist.policy.weight_deltas import HeldWeights

_COPIES_WEIGHTS = ("GptOssForCausalLM",)


class Layers:
    """Some layers of a model, in the form in which vLLM's reload takes a model."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._layers)

    def __contains__(self, layer: nn.Module) -> bool:
        return any(own is layer for own in self._layers)


class LoadMap:
    """Which layers of a model a checkpoint's tensors are loaded into, as seen in a load of all of them."""

    def __init__(self) -> None:
        self._layers: dict[str, set[nn.Module]] = {}
        self._is_complete = True

    def watch(self, model: nn.Module, held: HeldWeights) -> None:
        """Note what the reload that has just started loads, from views of ``held``."""
        self._layers, self._is_complete = {}, True
        for layer in model.modules():
            for tensor in get_layer_tensors(layer).values():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = self._noting(layer, tensor.weight_loader, held)

    def needed(self, changed: Collection[str]) -> tuple[set[str], set[nn.Module]] | None:
        """Return the layers of the tensors ``changed`` and all tensors of these layers.

        None: a model loaded tensors that are no views of the copy, so that their names are unknown.
        """
        if not self._is_complete:
            return None
        names, layers = set[str](), set[nn.Module]()
        while new := (set(changed) if not names else self._tensors_of(layers)) - names:
            names |= new
            layers |= {layer for name in new for layer in self._layers.get(name, ())}
        return names, layers

    def _tensors_of(self, layers: set[nn.Module]) -> set[str]:
        return {name for name, own in self._layers.items() if own & layers}

    def _noting(self, layer: nn.Module, loader: Callable[..., Any], held: HeldWeights) -> Callable[..., Any]:
        @wraps(loader)  # under its name, by which vLLM finds the loader inside
        def load(*arguments: Any, **named: Any) -> Any:
            given = [a for a in (*arguments, *named.values()) if type(a) is Tensor]
            found = [name for name in map(held.name_of, given) if name is not None]
            if len(found) == len(given) == 1:
                self._layers.setdefault(found[0], set()).add(layer)
            else:
                self._is_complete = False
            return loader(*arguments, **named)

        return load


def begin_reload(model: nn.Module, layers: Collection[nn.Module] | None = None) -> Layers:
    """Begin to load all weights of ``model``, or those of ``layers``; return what `end_reload` takes."""
    if layers is None:
        discard_partial_update(model)
        scope = Layers(model.modules())
    else:  # attention may derive what it computes with from the weights of linear layers
        scope = Layers(m for m in model.modules() if m in layers or is_deferred_attention_layer(m))
    if type(model).__name__ in _COPIES_WEIGHTS:
        # Their sinks are written in place, as no reload notices.
        scope = Layers(layer for layer in scope.modules() if "sinks" not in layer._parameters)
    repack_experts(scope)
    initialize_layerwise_reload(scope)
    if type(model).__name__ in _COPIES_WEIGHTS:
        notice_copies(scope)
    return scope


def notice_copies(scope: Layers) -> None:
    """Have the reload notice weights of experts that a model copies into their parameters.

    vLLM 0.32's GPT-OSS calls `copy_` and no loader, which on the reload's parameters without memory does
    nothing: the engine would go on with the old experts.
    """
    for layer in scope.modules():
        if not isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            continue
        for name, parameter in get_layer_tensors(layer).items():
            parameter.weight_loader = _copy_whole
            parameter.weight_loader = make_online_process_loader(layer, name)
            parameter.copy_ = partial(_load_copied, parameter)


def _copy_whole(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


def _load_copied(param: Any, loaded_weight: Tensor) -> None:
    param.weight_loader(param, loaded_weight)  # which may have been wrapped meanwhile


def end_reload(model: nn.Module, scope: Layers, config: Any) -> None:
    """End what `begin_reload` began. ``config``: vLLM's of the model."""
    finalize_layerwise_reload(scope, config)
    if getattr(config.hf_text_config, "tie_word_embeddings", False):
        refresh_tied_head(model, scope)


def discard_partial_update(model: nn.Module) -> None:
    """Discard parameters of an interrupted update: a layer that has some of them would count them twice, and
    would be processed before it has all.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights, info.load_numel = [], 0


def repack_experts(scope: Layers) -> None:
    """Have the reload pack the weights of experts as the first load does.

    vLLM 0.32 packs them for its CPU kernel only while a layer has no kernel yet (`_setup_kernel`). A reload
    would leave the kernel unpacked weights, from which it computes other experts without an error.
    """
    for layer in scope.modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, UnquantizedFusedMoEMethod):
            continue
        if method.unquantized_backend == UnquantizedMoeBackend.CPU:
            method.moe_kernel = None


def copy_unloaded(model: nn.Module, bucket: list[tuple[str, Tensor]]) -> None:
    """Copy the tensors of ``bucket`` that are not loaded yet: the reload keeps the parameters of a layer
    until it has all of them, and the bucket's memory is about to be overwritten.
    """
    memory = {tensor.untyped_storage().data_ptr() for _, tensor in bucket}
    for layer in model.modules():
        for _, arguments in get_layerwise_info(layer).loaded_weights:
            for name, value in arguments.arguments.items():
                if not isinstance(value, torch.Tensor) or value.is_meta:
                    continue
                if value.untyped_storage().data_ptr() in memory:
                    arguments.arguments[name] = value.clone()


def refresh_tied_head(model: nn.Module, scope: Layers) -> None:
    """Give a tied LM head the embedding it is tied to, if that is in ``scope``, and have it packed again.

    The reload fills the embedding; the head, which no checkpoint entry names, keeps the packed copy made when
    the model was first loaded (CPU engines pack every linear), and would compute logits from the first
    weights from then on.
    """
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    for head in heads:
        embeddings = [  # of its shape: Gemma 4 has one for the inputs of its layers, too
            m
            for m in model.modules()
            if isinstance(m, VocabParallelEmbedding)
            and not isinstance(m, ParallelLMHead)
            and m.weight.shape == head.weight.shape
        ]
        if len(embeddings) != 1:
            raise RuntimeError(
                f"weight sync: a tied LM head with {len(embeddings)} embeddings is not supported"
            )
        if embeddings[0] not in scope:
            continue
        if head.weight.data_ptr() != embeddings[0].weight.data_ptr():
            head.weight.data.copy_(embeddings[0].weight.data)
        head.quant_method.process_weights_after_loading(head)
