"""The receiving side of the weight sync: runs inside every worker process of a vLLM engine.

It plugs into vLLM's weight-transfer interface: packed buckets in, checked against the sender's checksum,
loaded through vLLM's own layerwise reload. It may hold a copy of them, and then receives changes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.config.load import LoadConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from actors.transfer.broadcasts import Transport
from actors.transfer.connections import Seat
from actors.transfer.delta_stream import receive_changes, receive_whole
from actors.transfer.held_weights import Giving, HeldTransfer
from actors.transfer.model_reload import Layers, LoadMap, begin_reload, copy_unloaded, end_reload
from actors.transfer.stream import receive
from actors.transfer.transport import open_transport
from grpo_dist.config import TransferBackend
from grpo_dist.errors import TransferLost
from grpo_dist.policy.lora import adapters, merged_weights
from grpo_dist.policy.snapshots import SnapshotReader
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.policy.weight_deltas import HeldWeights
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
    low-rank adapters, whose product is multiplied by it; None: they are whole weights. ``held``: of which a
    copy is kept; None: of none.
    """

    parameters: list[list[Any]]
    bucket_bytes: int
    adapter_scale: float | None = None
    held: HeldTransfer | None = None

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(name, dtype, tuple(shape)) for name, dtype, shape in self.parameters]


class PackedWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives buckets and loads them. Raises RuntimeError when the checksums of whole weights differ.

    Attributes:
        held: the copy of the weights, in host memory; its token is None while it is not whole.
        loaded: token of the weights in the model; None: others, or an update has not ended.
        giving: the copy is sent to an engine that joins.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    held: HeldWeights | None = None
    loaded: str | None = None
    giving: Giving | None = None
    _transport: Transport | None = None
    _loading: str | None = None  # token of the weights that this update has loaded
    _scope: Layers | None = None
    _map: LoadMap | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()  # leaves the group before, which had other engines
        if init_info.file is not None:
            self._transport = SnapshotReader(Path(init_info.file))
            return
        seat = init_info.seats[self.parallel_config.rank]
        self._transport = open_transport(init_info.backend, seat, timeout_s=init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Begin. Which layers are loaded is known once weights arrive."""
        self._loading = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        transport = self._transport
        if transport is None:
            raise RuntimeError("weight sync: init_weight_transfer_engine has not been called on this engine")
        with one_thread():
            if update_info.held is not None:
                self._receive_held(transport, update_info, update_info.held)
                return
            self.held = self.loaded = None
            self._scope = begin_reload(self.model)
            buckets = receive(transport, update_info.specs(), update_info.bucket_bytes)
            if update_info.adapter_scale is not None:
                self._load_adapters(buckets, update_info.adapter_scale)
                return
            for bucket in buckets:
                self.model.load_weights(bucket)
                copy_unloaded(self.model, bucket)

    def forget_loaded(self) -> None:
        """Note that the model's weights are lost: the next changes load all of the copy."""
        self.loaded = None

    def _receive_held(self, transport: Transport, info: UpdateInfo, wanted: HeldTransfer) -> None:
        """Receive whole weights or changes into the copy, and load them. After changes that do not lead to
        the sender's weights in every process of the engine, nothing is loaded, and the copy has no token.
        """
        held = self._copy(info)
        loaded, self.loaded = self.loaded, None
        if wanted.base is None:
            self._scope, self._map = begin_reload(self.model), LoadMap()
            self._map.watch(self.model, held)
            for bucket in receive_whole(transport, held):
                self.model.load_weights(bucket)
        else:
            changed, failure = _changes_or_error(wanted.base, transport, held)
            try:  # one that fails votes, too
                intact, in_model = in_all_processes(changed is not None, loaded == wanted.base)
            except RuntimeError as error:  # of gloo: another process of the engine is gone
                raise failure or TransferLost(f"weight sync: {error}") from error
            if failure is not None:
                raise failure
            if changed is None or not intact:
                return
            held.token = wanted.token
            self._load(held, changed if in_model else None)
        held.token = self._loading = wanted.token

    def _load(self, held: HeldWeights, changed: set[str] | None) -> None:
        """Load the tensors ``changed`` from the copy, with those that vLLM fuses them with; None: all."""
        needed = None if changed is None or self._map is None else self._map.needed(changed)
        names, layers = needed or (None, None)
        if layers is not None and not layers:
            return
        self._scope = begin_reload(self.model, layers)
        for bucket in held.weights():
            if own := [(name, tensor) for name, tensor in bucket if names is None or name in names]:
                self.model.load_weights(own)

    def _copy(self, info: UpdateInfo) -> HeldWeights:
        specs = info.specs()
        if self.held is None or not self.held.are(specs, info.bucket_bytes):
            self.held = None  # freed before another is made
            self.held = HeldWeights(specs, info.bucket_bytes)
        return self.held

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
        if self._scope is not None:
            end_reload(self.model, self._scope, self.model_config)
        self._scope, self.loaded = None, self._loading

    def shutdown(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def _changes_or_error(
    base: str, transport: Transport, held: HeldWeights
) -> tuple[set[str] | None, Exception | None]:
    """Return what `receive_changes` does, and no error; or None and the error."""
    if held.token != base:
        return None, RuntimeError(f"weight sync: changes of {base}, this engine holds {held.token}")
    try:
        return receive_changes(transport, held), None
    except Exception as error:
        return None, error


def in_all_processes(*facts: bool) -> list[bool]:
    """Return for each of ``facts`` whether it is true in every process of this engine. All of them call it.

    vLLM quantises the layers of a tensor parallel engine by the largest weights of all processes: one that
    loads layers that another does not load would wait for it forever.
    """
    group = get_tp_group()
    found = torch.tensor(facts, dtype=torch.int32)
    if group.world_size > 1:
        dist.all_reduce(found, dist.ReduceOp.MIN, group=group.cpu_group)  # bounded: by that of the call
    return [bool(fact) for fact in found]
