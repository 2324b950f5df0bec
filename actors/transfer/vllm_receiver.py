"""The receiving side of the weight sync: runs inside every worker process of a vLLM engine.

It plugs into vLLM's weight-transfer interface: packed buckets in, checked against the sender's checksum,
loaded through vLLM's own layerwise reload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config.load import LoadConfig
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
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from actors.transfer.broadcasts import Transport
from actors.transfer.connections import Seat
from actors.transfer.stream import receive
from actors.transfer.transport import open_transport
from grpo_dist.config import TransferBackend
from grpo_dist.policy.lora import adapters, merged_weights
from grpo_dist.policy.snapshots import SnapshotReader
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.hardware import one_thread


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``seats``: those of this engine's worker processes, in the order of their ranks within it. ``file``:
    the weights of a snapshot, which are read instead.
    """

    backend: TransferBackend = "gloo"
    seats: list[Seat] = field(default_factory=list)
    timeout_s: float = 0.0
    file: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``parameters``: (name, dtype, shape) of each, in the order sent. ``adapter_scale``: the parameters are
    low-rank adapters, whose product is multiplied by it; None: they are whole weights.
    """

    parameters: list[list[Any]]
    bucket_bytes: int
    adapter_scale: float | None = None

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.parameters]


class PackedWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets and loads them. Raises RuntimeError when the checksums differ."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _transport: Transport | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()  # leaves the group before, which had other engines
        if init_info.file is not None:
            self._transport = SnapshotReader(Path(init_info.file))
            return
        seat = init_info.seats[self.parallel_config.rank]
        self._transport = open_transport(init_info.backend, seat, timeout_s=init_info.timeout_s)

    def start_weight_update(self) -> None:
        discard_partial_update(self.model)
        repack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        transport = self._transport
        if transport is None:
            raise RuntimeError("weight sync: init_weight_transfer_engine has not been called on this engine")
        with one_thread():
            buckets = receive(transport, update_info.specs(), update_info.bucket_bytes)
            if update_info.adapter_scale is not None:
                self._load_adapters(buckets, update_info.adapter_scale)
                return
            for bucket in buckets:
                self.model.load_weights(bucket)
                copy_unloaded(self.model, bucket)

    def _load_adapters(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], scale: float) -> None:
        """Reload the checkpoint this engine was started from, with the adapters merged in.

        vLLM's own adapters cost time at every decoded token; this costs time once a sync. Nothing is held
        between two syncs; the operating system keeps the files in its cache.
        """
        # The next bucket overwrites a bucket. The checksum is compared before anything is loaded.
        low_rank = adapters([(name, tensor.clone()) for bucket in buckets for name, tensor in bucket])
        loader = DefaultModelLoader(LoadConfig(use_tqdm_on_load=False))
        checkpoint = loader.get_all_weights(self.model_config, self.model)
        self.model.load_weights(merged_weights(checkpoint, low_rank, scale, self.model_config.dtype))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            refresh_tied_head(self.model)

    def shutdown(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def discard_partial_update(model: torch.nn.Module) -> None:
    """Discard parameters of an interrupted update: a layer that has some of them would count them twice, and
    would be processed before it has all.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights, info.load_numel = [], 0


def repack_experts(model: torch.nn.Module) -> None:
    """Have the reload pack the weights of experts as the first load does.

    vLLM 0.32 packs them for its CPU kernel only while a layer has no kernel yet (`_setup_kernel`). A reload
    would leave the kernel unpacked weights, from which it computes other experts without an error.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, UnquantizedFusedMoEMethod):
            continue
        if method.unquantized_backend == UnquantizedMoeBackend.CPU:
            method.moe_kernel = None


def copy_unloaded(model: torch.nn.Module, bucket: list[tuple[str, torch.Tensor]]) -> None:
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


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Give a tied LM head the embedding it is tied to, and have it packed again.

    The reload fills the embedding; the head, which no checkpoint entry names, keeps the packed copy made when
    the model was first loaded (CPU engines pack every linear), and would compute logits from the first
    weights from then on.
    """
    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    embeddings = [
        m
        for m in model.modules()
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    for head in heads:
        if len(embeddings) != 1:
            raise RuntimeError(
                f"weight sync: a tied LM head with {len(embeddings)} embeddings is not supported"
            )
        if head.weight.data_ptr() != embeddings[0].weight.data_ptr():
            head.weight.data.copy_(embeddings[0].weight.data)
        head.quant_method.process_weights_after_loading(head)
