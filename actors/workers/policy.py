"""Policy workers: one Ray actor per ZeRO rank, which trains and sends its weights; and the driver's handle.

If one rank dies or hangs, all are lost: together they hold one sharded state. Every caller of the group gets
StateLost at once, and the run resumes with a new group from a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayTaskError

from actors.lifecycle.calls import (
    LOST,
    PARALLEL,
    Probeable,
    deadline_of,
    kill,
    one_at_a_time,
    reason,
    results,
)
from actors.lifecycle.team import ActorSpec, Team
from actors.placement.demands import Devices
from actors.placement.own_gpus import check_gpus
from actors.transfer.connections import Seat, new_secret, open_store
from actors.transfer.stream import send, send_changes
from actors.transfer.transport import Transport, open_transport
from actors.workers.exchange import as_arguments, from_arguments
from grpo_dist.batch.sharding import rows_of_ranks
from grpo_dist.config import (
    Config,
    ModelConfig,
    PolicyConfig,
    TimeoutsConfig,
    TransferBackend,
)
from grpo_dist.errors import StateLost, TransferLost, UserError
from grpo_dist.health import Bound
from grpo_dist.observe.profiling import profiled, trace_path
from grpo_dist.policy.extensions import build_in_own_directory, build_kernels, list_kernels
from grpo_dist.policy.loss import Objective
from grpo_dist.policy.snapshots import WEIGHTS, Snapshot, SnapshotWriter
from grpo_dist.policy.trainer import Trainer, TrainerSettings
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.policy.weight_deltas import SentWeights
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.hardware import DeviceType, device_type, one_thread
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.runtime.model_files import check_on_node
from grpo_dist.runtime.processes import freeze_loaded
from grpo_dist.runtime.rendezvous import Rank, listen
from grpo_dist.types import EpochUpdate, PackedSamples, Prompt, SentRows, TeacherLogprobs, TrainBatch


@dataclass(frozen=True, slots=True)
class Taken:
    """Weights that a rank has copied for sending.

    Attributes:
        base: token of the previous copy; None: there was none.
        metrics: the share of changed weights, and the seconds of each stage.
    """

    base: str | None
    metrics: dict[str, float]


class WeightSender(Metered):
    """The part of a `PolicyWorker` that sends its weights. Collective over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Any = None
        self._listening: socket.socket | None = None  # from `address` until a group has joined
        self._transports: dict[str, Transport] = {}
        self._snapshots = SnapshotWriter()
        self._sent = SentWeights()

    def parameter_specs(self, adapters_only: bool = False, as_held: bool = False) -> list[ParameterSpec]:
        return self._trainer.weights.specs(adapters_only=adapters_only, as_held=as_held)

    def address(self) -> tuple[str, int]:
        """Return this node's IP address and a port. This process listens there: as rank 0 of the next group,
        it lets the others join without opening the port again, which others could have taken meanwhile.
        """
        if self._listening is not None:
            self._listening.close()
        host = ray.util.get_node_ip_address()
        self._listening = listen(host)
        return host, self._listening.getsockname()[1]

    def open_transfer(self, group: str, backend: TransferBackend, seat: Seat, timeout_s: float) -> None:
        self.close_transfer(group)
        with self._listening_copy() as listening:
            seat = replace(seat, listening=listening)
            self._transports[group] = open_transport(backend, seat, timeout_s=timeout_s)

    def stop_joining(self, port: int) -> None:
        """Make a running or queued `open_transfer` at ``port`` fail: a member is lost. Called in parallel."""
        if (listening := self._listening) is not None:
            with suppress(OSError):  # it has just been closed
                if listening.getsockname()[1] == port:
                    listening.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _listening_copy(self) -> Iterator[int | None]:
        """Yield a copy of the descriptor of `address`, which the caller owns; None: there is none. Stop
        listening afterwards.
        """
        try:
            yield None if self._listening is None else os.dup(self._listening.fileno())
        finally:
            if self._listening is not None:
                self._listening.close()
            self._listening = None

    def close_transfer(self, group: str) -> None:
        """Leave ``group``, if this rank is a member."""
        if transport := self._transports.pop(group, None):
            transport.close()

    @contextmanager
    def _leave_on_error(self, group: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.close_transfer(group)
            raise

    @metered("sync")
    def send_weights(
        self, bucket_bytes: int, group: str, adapters_only: bool, as_held: bool = False
    ) -> dict[str, float]:
        """Gather the weights; if this rank has a transport for ``group``, send all buckets and a checksum.

        Returns the bytes sent and the seconds of each stage. After an error this rank leaves the group; the
        others notice at once and discard the received weights.
        """
        which = {"adapters_only": adapters_only, "as_held": as_held}
        weights = self._trainer.weights.buckets(bucket_bytes, **which)
        specs = self._trainer.weights.specs(**which)
        with self._leave_on_error(group), one_thread():
            return send(self._transports.get(group), weights, specs, bucket_bytes)

    @metered("sync")
    def take_weights(self, bucket_bytes: int, senders: Collection[int], token: str) -> Taken | None:
        """Gather the weights; the ranks ``senders`` copy them as ``token`` and find the changes."""
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
        """Send the last copy of the weights, or only its changes; see `send_weights`. Ranks without a
        transport for ``group`` do nothing.
        """
        transport, sent = self._transports.get(group), self._sent
        if transport is None:
            return {}
        assert sent.held is not None and sent.changes is not None, "no weights were taken"
        with self._leave_on_error(group), one_thread():
            if not whole:
                return send_changes(transport, sent.changes, sent.held)
            weights = sent.held
            return send(transport, weights.weights(), weights.specs, weights.bucket_bytes)

    @metered("snapshot")
    def snapshot(self, file: str, bucket_bytes: int, adapters_only: bool) -> list[ParameterSpec]:
        """Gather the weights; rank 0 copies them and writes them to ``file`` in the background, until
        `is_saved`. Updates may follow meanwhile. Returns the specs of the file's parameters.
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
    later_epochs: Sequence[Sequence[EpochUpdate]] = ()  # for all ranks; (): repeat the first epoch


Held = Literal["nothing", "weights", "all"]


class PolicyWorker(WeightSender, Probeable):
    """One rank. Methods are called on all ranks at once; calls run one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._trace: Path | None = None

    def start(
        self, rank: Rank, policy: PolicyConfig, model: ModelConfig, model_dir: str, settings: TrainerSettings
    ) -> tuple[DeviceType, float]:
        """Join the other ranks and load the model; return the device type and `Trainer.attention_cost`.

        Raises ValueError if this node has no ``model_dir``, and UserError like `check_gpus`.
        """
        check_gpus()
        check_on_node(model_dir)
        build_in_own_directory()
        skip_unused_imports()
        build_kernels(list_kernels(policy, device_type()))
        with self._listening_copy() as listening:
            rank = open_store(replace(rank, listening=listening))
        self._trainer = Trainer(rank, policy, model=model, model_dir=model_dir, settings=settings)
        freeze_loaded()  # because each offload collects garbage
        return self._trainer.device.type, self._trainer.attention_cost

    def update(
        self, updates: RankUpdates, kl_coef: float | None, bounds: Sequence[Bound]
    ) -> dict[str, float]:
        """Make the updates. ``kl_coef``: weight of the KL term; None: the configured one. ``bounds``: updates
        that exceed one are skipped.
        """
        trace, self._trace = self._trace, None
        with self.meter("update"), profiled(trace):
            return self._trainer.update(
                updates.batches, bounds, kl_coef=kl_coef, keep_logprobs=updates.keep_logprobs,
                later_epochs=updates.later_epochs,
            )  # fmt: skip

    def trace_next(self, run_dir: str, step: int) -> None:
        """Write a trace of the next `update`, in ``step``."""
        self._trace = trace_path(Path(run_dir), step, self._trainer.rank.index)

    def token_logprobs(self) -> dict[int, np.ndarray]:
        return self._trainer.token_logprobs

    def logprobs(self, updates: RankUpdates) -> tuple[str, dict[int, np.ndarray]]:
        """Return the policy's dtype name and the log-probs of all rows, by row id, float32 [C]."""
        return self._trainer.dtype_name, self._trainer.row_logprobs(updates.batches)

    @metered("logprobs")
    def score_norms(self, updates: RankUpdates) -> dict[int, np.ndarray]:
        """Return the score norms of `Trainer.row_logprobs`."""
        return self._trainer.row_logprobs(updates.batches, score_norms=True)

    @metered("logprobs")
    def base_logprobs(
        self, top_k: int, prompts: Sequence[Prompt], samples: Sequence[Any], *stored: PackedSamples
    ) -> list[list[TeacherLogprobs]]:
        """Return `Trainer.base_logprobs` of each group: one of ``prompts`` and its ``samples``, named by
        `as_arguments`.
        """
        names = zip(prompts, samples, strict=True)
        groups = [(prompt, from_arguments(name, stored)) for prompt, name in names]
        logprobs: list[list[TeacherLogprobs]] = self._trainer.base_logprobs(groups, top_k)
        return logprobs

    def hold(self, what: Held) -> None:
        """Keep all, only the weights for `send_weights`, or nothing on the device; offload the rest."""
        memory = self._trainer.memory
        if what != "all":
            memory.offload(keep_weights=what == "weights", timed=self.meter)
        if what != "nothing":
            memory.reload(only_weights=what == "weights")

    def check_sees(self, path: str) -> None:
        """Raise UserError if this node lacks ``path``, which the driver has just made."""
        if not Path(path).exists():
            raise UserError(
                f"{path}: node {platform.node()} of a policy rank does not see it, and the driver has just "
                "made it: checkpoints would lack this rank's part; set `output_dir` to a directory on "
                "storage that all nodes share"
            )

    def save(self, directory: str, blocking: bool) -> None:
        self.check_sees(str(Path(directory).parent))  # DeepSpeed would make it on this node alone
        self._trainer.save(Path(directory), blocking=blocking)

    def is_saved(self) -> bool:
        """Return whether the last checkpoint and snapshot are written. May run in parallel to updates."""
        return bool(self._trainer.state.is_saved()) and self._snapshots.is_written()

    def load(self, directory: str) -> None:
        self._trainer.load(Path(directory))

    def export(self, directory: str, tokenizer_dir: str) -> None:
        self._trainer.export(Path(directory), tokenizer_dir=tokenizer_dir)


def skip_unused_imports() -> None:
    """Keep DeepSpeed from two unused imports of 1.4 CPU seconds each per start: mlflow, for its autotuner,
    and torch's compiler, for its check for the Muon optimiser (here it is always AdamW).
    """
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
    muon = ModuleType("deepspeed.runtime.zero.muon.muon_optimizer")
    muon.MuonWithAuxAdam = type("MuonWithAuxAdam", (), {})  # type: ignore[attr-defined]
    sys.modules.setdefault(muon.__name__, muon)


def devices_of(_: PolicyWorker) -> Devices:
    """Return the GPUs that Ray assigned to this process."""
    context = ray.get_runtime_context()
    return Devices(context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", [])))


_SAVED_POLL_S = 0.2
_SHARDED = "all ranks go back to a checkpoint together"


@dataclass(frozen=True)
class PolicySpec:
    """The training specification, equal for all ranks."""

    settings: PolicyConfig
    model: ModelConfig
    model_dir: str
    trainer: TrainerSettings

    @classmethod
    def from_config(cls, config: Config, model_dir: Path) -> PolicySpec:
        trainer = TrainerSettings(
            objective=Objective(
                config.algorithm,
                config.distillation,
                demonstration_coef=config.demonstrations.coef if config.demonstrations else 0.0,
                code_paths=config.code_paths,
                supervised=config.is_supervised,
                of_sources=tuple(config.source_algorithms.values()),
            ),
            temperature=config.sampling.first_temperature,
            token_budget=config.batch.micro_batch_tokens,
            epochs=config.batch.epochs_per_batch,
            total_updates=config.total_updates,
            seed=config.seed,
        )
        return cls(config.policy, config.model, str(model_dir), trainer)


class PolicyGroup:
    """Driver-side handle of all ranks."""

    def __init__(
        self,
        spec: PolicySpec,
        actors: ActorSpec,
        *,
        timeouts: TimeoutsConfig,
        worker: type[PolicyWorker] = PolicyWorker,
    ) -> None:
        self._spec, self._settings = spec, spec.settings
        self._timeouts = timeouts
        actors = replace(actors, start_s=timeouts.start_s, irreplaceable=_SHARDED)
        self.team = Team("policy", actors.makers(one_at_a_time(worker), spec.settings.num_workers), actors)
        self.ranks = self.team.workers
        self.update_s = timeouts.update_s  # deadline of one step
        self.updates = 0  # requested so far; the ranks run calls in request order
        self.sent_after = 0  # `updates` when `send_weights` was last called
        self.device: DeviceType = "cpu"  # `ready` sets this and the attention cost
        self._attention_cost = 0.0
        # Set by `Colocation`: entered for each call that needs the GPUs; called before the weights change.
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self.on_change: Callable[[], None] = lambda: None

    async def ready(self) -> None:
        """Wait until all ranks have joined and loaded the model. Raises StateLost if one is lost."""
        first, *others = self.ranks
        (host, port), *_ = await results([first.address.remote(), *(rank.health.remote() for rank in others)])
        self.team.watch()  # from here on, ranks answer health checks, even while they load
        spec, size = self._spec, len(self.ranks)
        secret = new_secret()
        ranks = [Rank(i, size, host, port, self._timeouts.collective_s, secret) for i in range(size)]
        arguments = [(rank, spec.settings, spec.model, spec.model_dir, spec.trainer) for rank in ranks]
        started = await self._each("start", arguments)
        self.device, self._attention_cost = started[0]
        self.team.starting.clear()

    def stage(
        self,
        batches: Sequence[TrainBatch],
        *,
        keep_logprobs: bool = False,
        later_epochs: Sequence[Sequence[EpochUpdate]] = (),
    ) -> list[Any]:
        """Shard every batch over the ranks and put the shards into the object store. ``keep_logprobs``: for
        `token_logprobs` after the update. ``later_epochs``: see `Trainer.update`.

        Returns one reference per rank, the same for ranks that share sequences. Loss denominators are of the
        whole batch.
        """
        replicas, square = self._settings.replicas, self._attention_cost
        shards = [rows_of_ranks(batch, replicas, square=square) for batch in batches]
        staged = []
        for rank in range(replicas):
            rows: Any = [SentRows(b, by_rank[rank]) for b, by_rank in zip(batches, shards, strict=True)]
            staged.append(ray.put(RankUpdates(rows, keep_logprobs, later_epochs)))
        return [rows for rows in staged for _ in range(self._settings.sequence_parallel)]

    async def update(
        self,
        staged: Sequence[Any],
        *,
        kl_coef: float | None = None,
        bounds: Sequence[Bound] = (),
    ) -> dict[str, float]:
        """Make one optimiser update per staged batch (`stage`); see `PolicyWorker.update`."""
        arguments = [(rows, kl_coef, tuple(bounds)) for rows in staged]
        async with self.turn():
            self.on_change()
            self.updates += 1
            async with self._deadline(self.update_s, "optimiser updates"):
                return (await self._each("update", arguments))[0]

    async def trace_next(self, run_dir: Path, step: int) -> None:
        """Make each rank write a trace of the next update to ``run_dir``, which all ranks can write to."""
        async with self._deadline(self.update_s, "start of the profiler"):
            await self._all("trace_next", str(run_dir.absolute()), step)

    async def token_logprobs(self) -> dict[int, np.ndarray]:
        """Return the log-probs of the tokens trained by the last `update`, by row id, float32 [C], nats.

        Empty unless it had ``keep_logprobs``. See `Trainer.token_logprobs`.
        """
        async with self._deadline(self.update_s, "log-probs of tokens"):
            answers = await self._all("token_logprobs")
        return {row: values for answer in answers for row, values in answer.items()}

    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]:
        """Return log-probs of the rows of ``batch``, see `PolicyWorker.logprobs`."""
        answers = await self._call_with_rows("logprobs", batch, "log-probs")
        rows = {row: values for _, rank_rows in answers for row, values in rank_rows.items()}
        return answers[0][0], rows

    async def score_norms(self, batch: TrainBatch) -> dict[int, np.ndarray]:
        """Return the score norms of the trained tokens of ``batch`` under the current weights, by row id,
        float32 [C]; see `selected_score_norms`.
        """
        answers = await self._call_with_rows("score_norms", batch, "score norms of tokens")
        return {row: values for rank_rows in answers for row, values in rank_rows.items()}

    async def _call_with_rows(self, method: str, batch: TrainBatch, stage: str) -> list[Any]:
        arguments = [(rows,) for rows in self.stage([batch])]
        async with self.turn(), self._deadline(self.update_s, stage):
            return await self._each(method, arguments)

    async def base_logprobs(
        self, groups: Sequence[tuple[Prompt, Any]], top_k: int = 0
    ) -> list[list[TeacherLogprobs]]:
        """Return the log-probs of each group's samples under the model without its adapters, with the
        ``top_k`` likeliest tokens at each position.

        ``groups``: prompts, and their samples or `StoredSamples`. Ranks that share sequences get
        the same groups.
        """
        replicas, together = self._settings.replicas, self._settings.sequence_parallel
        groups_by_rank = [groups[i::replicas] for i in range(replicas) for _ in range(together)]
        arguments = []
        for rank_groups in groups_by_rank:
            names, stored = as_arguments(samples for _, samples in rank_groups)
            arguments.append((top_k, [prompt for prompt, _ in rank_groups], names, *stored))
        async with self._deadline(self.update_s, "log-probs without adapters"):
            answers = (await self._each("base_logprobs", arguments))[::together]
        return [answers[i % replicas][i // replicas] for i in range(len(groups))]

    @property
    def adapter_scale(self) -> float | None:
        """The factor by which engines scale received adapters; None: they receive whole weights."""
        lora = self._settings.lora
        return lora.scale if lora is not None and lora.sync == "adapter" else None

    async def send_weights(
        self, bucket_bytes: int, *, group: str, adapters_only: bool, as_held: bool = False
    ) -> dict[str, float]:
        """Send the weights while the other members of the transfer group receive; return rank 0's metrics.

        The caller sets the deadline. ``sent_after`` is then the number of updates in these weights.
        """
        self.sent_after = self.updates
        async with self._as_cause("weights gathered and sent"):
            return (await self._all("send_weights", bucket_bytes, group, adapters_only, as_held))[0]

    async def take_weights(self, bucket_bytes: int, senders: Sequence[int], token: str) -> Taken:
        """Make the ranks ``senders`` copy the weights as ``token``, for `weight_sync.deltas`, and find the
        changes since the last call; return the first rank's result.

        Raises StateLost if a rank is lost. The caller sets the deadline.
        """
        self.sent_after = self.updates
        async with self._as_cause("weights gathered and compared"):
            answers = await self._all("take_weights", bucket_bytes, senders, token)
        answers = [answer for answer in answers if answer]
        bases = {answer.base for answer in answers}
        return replace(answers[0], base=bases.pop() if len(bases) == 1 else None)

    async def send_taken(self, *, group: str, whole: bool) -> dict[str, float]:
        """Send the copy of `take_weights`, or only its changes; see `send_weights`."""
        async with self._as_cause("taken weights sent"):
            return next(filter(None, await self._all("send_taken", group, whole)), {})

    async def snapshot(self, directory: Path, version: int, bucket_bytes: int) -> Snapshot:
        """Write the weights, of ``version``, to ``directory`` in the background. Updates may follow at once;
        `saved` waits for the file.
        """
        scale, path = self.adapter_scale, str(directory.absolute())
        async with self.turn(), self._deadline(self._timeouts.save_s, f"snapshot of version {version}"):
            specs = await self._all("snapshot", f"{path}/{WEIGHTS}", bucket_bytes, scale is not None)
        return Snapshot(path, version, bucket_bytes, scale, tuple(specs[0]))

    async def hold(self, what: Held) -> None:
        """Keep everything, only the weights for `send_weights`, or nothing on the ranks' devices; offload the
        rest. Other calls need "all". Frees the last update's memory, unless ``what`` is "all". The caller
        sets the deadline.
        """
        await self._all("hold", what)

    async def check_sees(self, path: Path) -> None:
        """Raise UserError if a rank's node lacks ``path``; see `PolicyWorker.check_sees`."""
        async with self._deadline(self._timeouts.save_s, f"search for {path}"):
            await self._all("check_sees", str(path.absolute()))

    async def save(self, directory: Path, *, blocking: bool = True) -> None:
        """Save a checkpoint; the parent of ``directory`` exists. ``blocking`` False: updates may follow at
        once; `saved` waits for the files.
        """
        async with self.turn(), self._deadline(self._timeouts.save_s, f"checkpoint to {directory}"):
            await self._all("save", str(directory.absolute()), blocking)

    async def saved(self) -> None:
        """Wait until every rank has written the files of its last `save` and `snapshot`.

        Raises StateLost if a rank is lost or late, and the error of a file that cannot be written.
        """
        try:
            stage = f"policy: files of {len(self.ranks)} rank(s)"
            async with deadline_of(self.team.named(), self._timeouts.save_s, stage):
                while not all(await self._all("is_saved", group=PARALLEL)):
                    await asyncio.sleep(_SAVED_POLL_S)
        except TimeoutError as error:
            raise StateLost(f"{error}: {_SHARDED}") from error

    async def load(self, directory: Path) -> None:
        async with self.turn():
            self.on_change()
            async with self._deadline(self._timeouts.save_s, f"restore from {directory}"):
                await self._all("load", str(directory.absolute()))

    async def export(self, directory: Path, *, tokenizer_dir: Path) -> None:
        async with self.turn(), self._deadline(self._timeouts.save_s, f"export to {directory}"):
            await self._all("export", str(directory.absolute()), str(tokenizer_dir))

    async def shutdown(self) -> None:
        await self.team.shutdown()
        kill(self.ranks)

    @asynccontextmanager
    async def _deadline(self, seconds: float, stage: str) -> AsyncIterator[None]:
        """Limit the time of calls to the ranks, and tell a lost rank from an error in a call.

        Raises StateLost if a rank is lost, late, or fails in CUDA, NCCL, gloo or memory; re-raises other
        errors of a rank.
        """
        what = f"policy: {stage} on {len(self.ranks)} rank(s)"
        try:
            async with self._as_cause(what), deadline_of(self.team.named(), seconds, what):
                yield
        except TimeoutError as error:
            raise StateLost(f"{error}: {_SHARDED}") from error

    @asynccontextmanager
    async def _as_cause(self, what: str) -> AsyncIterator[None]:
        """Raise StateLost if a rank's error means that a rank is lost."""
        try:
            yield
        except RayTaskError as error:
            if isinstance(error.cause, TransferLost):  # the weight sync handles it
                raise
            await self.team.ask_all()
            if isinstance(error.cause, RuntimeError):  # from CUDA, NCCL, gloo or memory
                raise StateLost(f"{what}: failed ({reason(error)}): {_SHARDED}") from error
            raise

    async def _all(self, method: str, *arguments: Any, group: str | None = None) -> list[Any]:
        """Call ``method`` with the same arguments on every rank; see `_each`."""
        return await self._each(method, [arguments] * len(self.ranks), group)

    async def _each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], group: str | None = None
    ) -> list[Any]:
        """Call ``method`` on every rank with that rank's arguments. Raises StateLost as soon as a rank is
        lost, even while the others wait for it in a collective.
        """
        self.team.check()
        calls = [_remote(rank, method, group) for rank in self.ranks]
        refs = [call(*rank_arguments) for call, rank_arguments in zip(calls, arguments, strict=True)]
        lost = asyncio.create_task(self.team.failed.wait())  # bounded: it ends with the answers
        answers = asyncio.create_task(
            gather(self._answer(i, ref) for i, ref in enumerate(refs)), name=f"policy {method}"
        )
        try:
            await asyncio.wait(  # bounded: every caller has a deadline
                [lost, answers], return_when=asyncio.FIRST_COMPLETED
            )
            self.team.check()
            return await answers
        finally:
            lost.cancel()
            answers.cancel()
            answers.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _answer(self, index: int, ref: Any) -> Any:
        """Return the answer of rank ``index``; report the rank if it is lost."""
        try:
            return await ref
        except LOST as error:
            self.team.lost(index, self.ranks[index], error)
            self.team.check()
            raise


def _remote(rank: Any, method: str, group: str | None) -> Any:
    """Return the remote function ``method`` of ``rank``, in the concurrency ``group``."""
    call = getattr(rank, method)
    return (call.options(concurrency_group=group) if group else call).remote
