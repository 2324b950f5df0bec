"""Receive the weight sync in every worker process of a vLLM engine.

It plugs into vLLM's weight-transfer interface: receives packed buckets, checks them against the sender's
checksum, and loads them through vLLM's layerwise reload. It may hold a copy of the weights and then receive
only changes; it loads the whole copy, since an update changes some words of nearly every tensor.

The reload fills a new layer, packs or quantises it, and copies the result into the layer's old weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.config.load import LoadConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from actors.transfer.connections import Seat
from actors.transfer.stream import HeldTransfer, receive, receive_changes, receive_whole
from actors.transfer.transport import Transport, open_transport
from grpo_dist.config import TransferBackend
from grpo_dist.errors import TransferLost
from grpo_dist.policy.lora import adapters, merged_weights
from grpo_dist.policy.snapshots import SnapshotReader
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.policy.weight_deltas import HeldWeights
from grpo_dist.runtime.hardware import one_thread

_COPIES_WEIGHTS = ("GptOssForCausalLM",)


class Layers:
    """Layers of a model, with the interface that vLLM's reload expects of a model."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)

    def modules(self) -> Iterator[nn.Module]:
        return iter(self._layers)


def begin_reload(model: nn.Module) -> Layers:
    """Begin to reload all weights of ``model``; return the scope for `end_reload`."""
    discard_partial_update(model)
    scope = Layers(model.modules())
    if type(model).__name__ in _COPIES_WEIGHTS:
        # Their sinks are written in place, which the reload does not notice.
        scope = Layers(layer for layer in scope.modules() if "sinks" not in layer._parameters)
    repack_experts(scope)
    initialize_layerwise_reload(scope)
    if type(model).__name__ in _COPIES_WEIGHTS:
        notice_copies(scope)
    return scope


def notice_copies(scope: Layers) -> None:
    """Make the reload notice expert weights that a model copies into its parameters.

    vLLM 0.32's GPT-OSS calls `copy_` and no loader. On the reload's meta parameters this does nothing: the
    engine would continue with the old experts.
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
    param.weight_loader(param, loaded_weight)  # may have been wrapped meanwhile


def end_reload(model: nn.Module, scope: Layers, config: Any) -> None:
    """Finish the reload of `begin_reload`. ``config``: vLLM's model config."""
    finalize_layerwise_reload(scope, config)
    if getattr(config.hf_text_config, "tie_word_embeddings", False):
        refresh_tied_head(model)


def discard_partial_update(model: nn.Module) -> None:
    """Discard parameters of an interrupted update: a layer would count them twice, and would be processed
    before it is complete.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights, info.load_numel = [], 0


def repack_experts(scope: Layers) -> None:
    """Make the reload pack expert weights as the first load does.

    vLLM 0.32 packs them for its CPU kernel only while a layer has no kernel yet (`_setup_kernel`). After a
    reload, the kernel would silently compute wrong outputs from unpacked weights.
    """
    for layer in scope.modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, UnquantizedFusedMoEMethod):
            continue
        if method.unquantized_backend == UnquantizedMoeBackend.CPU:
            method.moe_kernel = None


def copy_unloaded(model: nn.Module, bucket: list[tuple[str, Tensor]]) -> None:
    """Copy tensors of ``bucket`` that are not loaded yet: the reload keeps a layer's parameters until it has
    all of them, and the bucket's memory is about to be overwritten.
    """
    memory = {tensor.untyped_storage().data_ptr() for _, tensor in bucket}
    for layer in model.modules():
        for _, arguments in get_layerwise_info(layer).loaded_weights:
            for name, value in arguments.arguments.items():
                if not isinstance(value, torch.Tensor) or value.is_meta:
                    continue
                if value.untyped_storage().data_ptr() in memory:
                    arguments.arguments[name] = value.clone()


def refresh_tied_head(model: nn.Module) -> None:
    """Copy the tied embedding into an LM head and pack it again.

    The reload fills only the embedding: no checkpoint entry names the head. It would keep the packed copy of
    the first load (CPU engines pack every linear) and compute logits from the initial weights.
    """
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    for head in heads:
        embeddings = [  # with the head's shape: Gemma 4 has another one for its layers' inputs
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
        if head.weight.data_ptr() != embeddings[0].weight.data_ptr():
            head.weight.data.copy_(embeddings[0].weight.data)
        head.quant_method.process_weights_after_loading(head)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``seats``: seats of this engine's worker processes, in rank order. ``file``: a snapshot to read the
    weights from instead.
    """

    backend: TransferBackend = "gloo"
    seats: list[Seat] = field(default_factory=list)
    timeout_s: float = 0.0
    file: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``parameters``: (name, dtype, shape) of each, in the order sent. ``adapter_scale``: the parameters are
    low-rank adapters, whose product is scaled by it; None: they are whole weights. ``held``: the weights to
    keep a copy of; None: keep no copy.
    """

    parameters: list[list[Any]]
    bucket_bytes: int
    adapter_scale: float | None = None
    held: HeldTransfer | None = None

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.parameters]


class PackedWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets and loads them. Raises RuntimeError if the checksums of whole weights differ.

    Attributes:
        held: the copy of the weights in host memory; its token is None while it is incomplete.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    held: HeldWeights | None = None
    _transport: Transport | None = None
    _scope: Layers | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()  # leaves the previous group, which had other engines
        if init_info.file is not None:
            self._transport = SnapshotReader(Path(init_info.file))
            return
        seat = init_info.seats[self.parallel_config.rank]
        self._transport = open_transport(init_info.backend, seat, timeout_s=init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Do nothing: layers are loaded once weights arrive."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        transport = self._transport
        if transport is None:
            raise RuntimeError("weight sync: init_weight_transfer_engine has not been called on this engine")
        with one_thread():
            if update_info.held is not None:
                self._receive_held(transport, update_info, update_info.held)
                return
            self.held = None
            self._scope = begin_reload(self.model)
            buckets = receive(transport, update_info.specs(), update_info.bucket_bytes)
            if update_info.adapter_scale is not None:
                self._load_adapters(buckets, update_info.adapter_scale)
                return
            for bucket in buckets:
                self.model.load_weights(bucket)
                copy_unloaded(self.model, bucket)

    def _receive_held(self, transport: Transport, info: UpdateInfo, held: HeldTransfer) -> None:
        """Receive whole weights or changes into the copy, and load them. If the changes do not give the
        sender's weights in every process of the engine, load nothing and leave the copy without a token.
        """
        copy = self._prepare_copy(info)
        if held.base is None:
            self._scope = begin_reload(self.model)
            for bucket in receive_whole(transport, copy):
                self.model.load_weights(bucket)
        else:
            intact, failure = _changes_or_error(held.base, transport, copy)
            try:  # a failed process votes, too
                intact = is_true_in_all(intact)
            except RuntimeError as error:  # from gloo: another process of the engine is gone
                raise failure or TransferLost(f"weight sync: {error}") from error
            if failure is not None:
                raise failure
            if not intact:
                return
            copy.token = held.token  # even if the load is interrupted: the next one loads the whole copy
            self._scope = begin_reload(self.model)
            for bucket in copy.weights():
                self.model.load_weights(bucket)
        copy.token = held.token

    def _prepare_copy(self, info: UpdateInfo) -> HeldWeights:
        specs = info.specs()
        if self.held is None or not self.held.are(specs, info.bucket_bytes):
            self.held = None  # freed before the new one is made
            self.held = HeldWeights(specs, info.bucket_bytes)
        return self.held

    def _load_adapters(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], scale: float) -> None:
        """Reload the checkpoint that this engine started from, with the adapters merged in.

        vLLM's adapters cost time at every decoded token; merging costs time once per sync. Nothing is kept
        between syncs; the operating system caches the files.
        """
        # Clone: the next bucket reuses the memory. The checksum is compared before anything is loaded.
        low_rank = adapters([(name, tensor.clone()) for bucket in buckets for name, tensor in bucket])
        loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
        checkpoint = loader.get_all_weights(self.model_config, self.model)
        self.model.load_weights(merged_weights(checkpoint, low_rank, scale, self.model_config.dtype))

    def finish_weight_update(self) -> None:
        if self._scope is not None:
            end_reload(self.model, self._scope, self.model_config)
        self._scope = None

    def shutdown(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def _changes_or_error(base: str, transport: Transport, copy: HeldWeights) -> tuple[bool, Exception | None]:
    """Return the result of `receive_changes` and None, or False and the error."""
    if copy.token != base:
        return False, RuntimeError(f"weight sync: changes of {base}, this engine holds {copy.token}")
    try:
        return receive_changes(transport, copy), None
    except Exception as error:
        return False, error


def is_true_in_all(fact: bool) -> bool:
    """Return whether ``fact`` is true in every process of this engine. Collective.

    vLLM quantises the layers of a tensor-parallel engine by the largest weights of all processes: if only
    some processes loaded a layer, they would wait forever.
    """
    group = get_tp_group()
    flag = torch.tensor(fact, dtype=torch.int32)
    if group.world_size > 1:
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=group.cpu_group)  # bounded: by the call's deadline
    return bool(flag)
