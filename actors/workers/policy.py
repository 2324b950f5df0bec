"""Policy workers: one Ray actor per ZeRO rank, which trains and gives its weights to others. `policy_group`
has the driver's handle of all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import ray

from actors.lifecycle.probe import Probeable
from actors.placement.demands import Devices
from actors.placement.own_gpus import check_gpus
from actors.transfer.connections import Seat, open_store
from actors.transfer.stream import send, send_changes
from actors.transfer.transport import Transport, free_port, open_transport
from actors.workers.exchange import from_arguments
from grpo_dist.config import ModelConfig, PolicyConfig, TransferBackend
from grpo_dist.health import Bound
from grpo_dist.observe.profiling import profiled, trace_path
from grpo_dist.policy.extensions import build_in_own_directory, build_kernels, list_kernels
from grpo_dist.policy.snapshots import SnapshotWriter
from grpo_dist.policy.trainer import Trainer, TrainerSettings
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.policy.weight_deltas import SentWeights
from grpo_dist.runtime.hardware import DeviceType, device_type, one_thread
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.model_files import check_on_node
from grpo_dist.runtime.processes import freeze_loaded
from grpo_dist.runtime.rendezvous import Rank
from grpo_dist.types import EpochUpdate, PackedSamples, Prompt, Rollout, TeacherLogprobs, TrainBatch


@dataclass(frozen=True, slots=True)
class Taken:
    """Weights that a rank has copied to send them.

    Attributes:
        base: token of those copied before; None: there were none.
        metrics: what has changed since, and the seconds of each stage.
    """

    base: str | None
    metrics: dict[str, float]


class WeightSender(Metered):
    """The part of a `PolicyWorker` that sends its weights. All ranks are called at once."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Any = None
        self._transports: dict[str, Transport] = {}
        self._snapshots = SnapshotWriter()
        self._sent = SentWeights()

    def parameter_specs(self, adapters_only: bool = False, as_held: bool = False) -> list[ParameterSpec]:
        return self._trainer.weights.specs(adapters_only=adapters_only, as_held=as_held)

    def open_transfer(self, group: str, backend: TransferBackend, seat: Seat, timeout_s: float) -> None:
        self.close_transfer(group)
        self._transports[group] = open_transport(backend, seat, timeout_s=timeout_s)

    def close_transfer(self, group: str) -> None:
        """Leave the group, if this rank is in it."""
        if transport := self._transports.pop(group, None):
            transport.close()

    @metered("sync")
    def send_weights(
        self, bucket_bytes: int, group: str, adapters_only: bool, as_held: bool = False
    ) -> dict[str, float]:
        """Gather the weights; where this rank has a transport for ``group``, send all buckets and a checksum.

        Returns the bytes sent and the seconds it took. After an error this rank leaves the group, by which
        the others notice at once; they discard what they received.
        """
        which = {"adapters_only": adapters_only, "as_held": as_held}
        weights = self._trainer.weights.buckets(bucket_bytes, **which)
        specs = self._trainer.weights.specs(**which)
        try:
            with one_thread():
                return send(self._transports.get(group), weights, specs, bucket_bytes)
        except Exception:
            self.close_transfer(group)
            raise

    @metered("sync")
    def take_weights(self, bucket_bytes: int, senders: Collection[int], token: str) -> Taken | None:
        """Gather the weights; the ranks ``senders`` copy them as ``token`` and find what has changed."""
        weights = self._trainer.weights.buckets(bucket_bytes)
        if self._trainer.rank.index not in senders:
            for _ in weights:
                pass
            return None
        specs = self._trainer.weights.specs()
        with one_thread():
            changes = self._sent.take(weights, specs, bucket_bytes, self._trainer.device, token)
        return Taken(changes.base, {"sync/changed_share": changes.changed_share} | changes.seconds)

    @metered("sync")
    def send_taken(self, group: str, whole: bool) -> dict[str, float]:
        """Send the weights taken last, or what has changed in them; see `send_weights`. Ranks without a
        transport for ``group`` do nothing.
        """
        transport, taken = self._transports.get(group), self._sent
        if transport is None:
            return {}
        assert taken.held is not None and taken.changes is not None, "no weights were taken"
        try:
            with one_thread():
                if not whole:
                    return send_changes(transport, taken.changes, taken.held)
                weights = taken.held
                return send(transport, weights.weights(), weights.specs, weights.bucket_bytes)
        except Exception:
            self.close_transfer(group)
            raise

    @metered("snapshot")
    def snapshot(self, file: str, bucket_bytes: int, adapters_only: bool) -> list[ParameterSpec]:
        """Gather the weights; rank 0 copies them, and writes them to ``file`` while updates follow, until
        `is_saved`. Returns what is in the file.
        """
        weights = self._trainer.weights.buckets(bucket_bytes, adapters_only=adapters_only)
        specs = self.parameter_specs(adapters_only)
        first = self._trainer.rank.index == 0
        if first:
            self._snapshots.begin(Path(file))
        send(self._snapshots if first else None, weights, specs, bucket_bytes)
        return specs


@dataclass(frozen=True, slots=True)
class RankUpdates:
    """The rows of one rank in each update of a step."""

    batches: Sequence[TrainBatch]  # on the driver `SentRows`
    keep_logprobs: bool  # for `PolicyWorker.token_logprobs`
    later_epochs: Sequence[Sequence[EpochUpdate]] = ()  # of all ranks; (): the first epoch's again


Held = Literal["nothing", "weights", "all"]


class PolicyWorker(WeightSender, Probeable):
    """One rank. Its methods are called on all ranks at once; calls run one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._trace: Path | None = None

    def address(self) -> tuple[str, int]:
        """Return an address at which this rank can listen: that of its node, and a free port."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def start(
        self, rank: Rank, policy: PolicyConfig, model: ModelConfig, model_dir: str, settings: TrainerSettings
    ) -> tuple[DeviceType, float]:
        """Join the other ranks and load the model; return the device type and `Trainer.attention_cost`.

        Raises ValueError where this node has no ``model_dir``, and UserError as `check_gpus`.
        """
        check_gpus()
        check_on_node(model_dir)
        build_in_own_directory()
        skip_unused_imports()
        build_kernels(list_kernels(policy, device_type()), self.begin)
        self.begin("model and DeepSpeed")
        self._trainer = Trainer(open_store(rank), policy, model=model, model_dir=model_dir, settings=settings)
        freeze_loaded()  # each offload collects garbage
        self.begin("")
        return self._trainer.device.type, self._trainer.attention_cost

    def update(
        self, updates: RankUpdates, kl_coef: float | None, bounds: Sequence[Bound]
    ) -> dict[str, float]:
        """``kl_coef``: weight of the KL term in these updates; None: the configured one.
        ``bounds``: no update that passes one is made.
        """
        trace, self._trace = self._trace, None
        with self.meter("update"), profiled(trace):
            return self._trainer.update(
                updates.batches, bounds, kl_coef=kl_coef, keep_logprobs=updates.keep_logprobs,
                later_epochs=updates.later_epochs,
            )  # fmt: skip

    def trace_next(self, run_dir: str, step: int) -> None:
        """Write a trace of the next `update`, that of ``step``."""
        self._trace = trace_path(Path(run_dir), step, self._trainer.rank.index)

    def token_logprobs(self) -> dict[int, np.ndarray]:
        return self._trainer.token_logprobs

    def logprobs(self, updates: RankUpdates) -> tuple[str, dict[int, np.ndarray]]:
        """Return the name of the policy's dtype and, by row id, log-probs of all rows, float32 [C]."""
        return self._trainer.dtype_name, self._trainer.row_logprobs(updates.batches)

    @metered("logprobs")
    def score_norms(self, updates: RankUpdates) -> dict[int, np.ndarray]:
        """Return the score norms of `Trainer.row_logprobs`."""
        return self._trainer.row_logprobs(updates.batches, score_norms=True)

    @metered("logprobs")
    def base_logprobs(
        self, prompts: Sequence[Prompt], samples: Sequence[Any], *stored: PackedSamples
    ) -> list[list[np.ndarray]]:
        """Return `Trainer.base_logprobs` of groups: the ``samples`` of each of ``prompts``, named by
        `as_arguments`.
        """
        logprobs: list[list[np.ndarray]] = self._trainer.base_logprobs(_groups(prompts, samples, stored))
        return logprobs

    @metered("logprobs")
    def base_top_logprobs(
        self, top_k: int, prompts: Sequence[Prompt], samples: Sequence[Any], *stored: PackedSamples
    ) -> list[list[TeacherLogprobs]]:
        """Return `Trainer.base_logprobs` with ``top_k``, as `base_logprobs` does."""
        logprobs: list[list[TeacherLogprobs]] = self._trainer.base_logprobs(
            _groups(prompts, samples, stored), top_k
        )
        return logprobs

    def hold(self, what: Held) -> None:
        """Keep on the device all, what `send_weights` needs, or nothing; the rest waits in host memory."""
        memory = self._trainer.memory
        if what != "all":
            memory.offload(keep_weights=what == "weights", timed=self.meter)
        if what != "nothing":
            memory.reload(only_weights=what == "weights")

    def save(self, directory: str, blocking: bool) -> None:
        self._trainer.save(Path(directory), blocking=blocking)

    def is_saved(self) -> bool:
        """Return whether all files of the last checkpoint and snapshot are written. May run in parallel to
        an update.
        """
        return bool(self._trainer.state.is_saved()) and self._snapshots.is_written()

    def load(self, directory: str) -> None:
        self._trainer.load(Path(directory))

    def export(self, directory: str, tokenizer_dir: str) -> None:
        self._trainer.export(Path(directory), tokenizer_dir=tokenizer_dir)


def skip_unused_imports() -> None:
    """Keep DeepSpeed from importing what takes 1.4 CPU seconds each of a start and is unused: its autotuner
    mlflow; its test whether the optimiser is its Muon, AdamW being the only one here, torch's compiler.
    """
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
    muon = ModuleType("deepspeed.runtime.zero.muon.muon_optimizer")
    muon.MuonWithAuxAdam = type("MuonWithAuxAdam", (), {})  # type: ignore[attr-defined]
    sys.modules.setdefault(muon.__name__, muon)


def _groups(
    prompts: Sequence[Prompt], samples: Sequence[Any], stored: Sequence[PackedSamples]
) -> list[tuple[Prompt, Sequence[Rollout]]]:
    return [(prompt, from_arguments(own, stored)) for prompt, own in zip(prompts, samples, strict=True)]


def devices_of(_: PolicyWorker) -> Devices:
    """Return the GPUs that Ray gave this process."""
    context = ray.get_runtime_context()
    return Devices(context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", [])))
