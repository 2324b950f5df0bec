"""The receiving side of the weight sync: runs inside every worker process of a vLLM engine.

It plugs into vLLM's weight-transfer interface: packed buckets in, checked against the sender's checksum,
loaded through vLLM's own layerwise reload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from actors.transport import Transport, open_transport
from actors.weight_stream import receive
from grpo_dist.lora import adapters, merged_weights
from grpo_dist.weight_buckets import ParameterSpec


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``rank_offset``: rank of this engine's first worker process in the transfer group."""

    host: str
    port: int
    rank_offset: int
    world_size: int
    bucket_bytes: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Every parameter of the round, in the order sent: (name, dtype, shape). ``adapter_scale``: they are
    low-rank adapters, whose product counts so many times.
    """

    parameters: list[list[Any]]
    adapter_scale: float | None = None

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.parameters]


class PackedWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets over ``backend`` and loads them. Raises RuntimeError when the checksums differ."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    backend: ClassVar[str]
    _transport: Transport | None = None
    _bucket_bytes = 0

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._bucket_bytes = init_info.bucket_bytes
        self._transport = open_transport(
            self.backend,
            init_info.host,
            init_info.port,
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        transport = self._transport
        if transport is None:
            raise RuntimeError("weight sync: init_weight_transfer_engine has not been called on this engine")
        buckets = receive(transport, update_info.specs(), self._bucket_bytes)
        if update_info.adapter_scale is not None:
            self._load_adapters(buckets, update_info.adapter_scale)
            return
        for bucket in buckets:
            self.model.load_weights(bucket)

    def _load_adapters(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], scale: float) -> None:
        """Read the checkpoint this engine was started from again, with the adapters merged in on the way.

        Not vLLM's own adapters: those cost time at every decoded token, this costs once a sync. Nothing is
        held between two syncs; the operating system keeps the files in its cache.
        """
        low_rank = adapters(pair for bucket in buckets for pair in bucket)  # checked before any is loaded
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


class GlooWeightTransfer(PackedWeightTransfer):
    backend = "gloo"


class NcclWeightTransfer(PackedWeightTransfer):
    backend = "nccl"


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Give a tied LM head the embedding it is tied to, and have it pack that anew.

    The reload fills the embedding; the head, which no checkpoint entry names, keeps the packed copy made when
    the model was first loaded (CPU engines pack every linear), and would compute logits from the first
    weights for ever.
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
                f"weight sync: a tied LM head beside {len(embeddings)} embeddings is not supported"
            )
        if head.weight.data_ptr() != embeddings[0].weight.data_ptr():
            head.weight.data.copy_(embeddings[0].weight.data)
        head.quant_method.process_weights_after_loading(head)
