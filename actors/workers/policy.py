"""Policy workers: one Ray actor per ZeRO rank, and the group that speaks for all of them.

A rank that dies or hangs takes the others with it: what they hold is one state in shards. Whoever asks the
group for anything is told at once (StateLost), and the run goes on with a new group from a checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayTaskError

from actors.lifecycle.calls import BESIDE, LOST, Places, kill, makers, one_at_a_time, results
from actors.lifecycle.supervisor import Team, Watched, reason
from actors.lifecycle.watchdog import deadline_of
from actors.placement.demands import Devices
from actors.transfer.connections import Seat
from actors.transfer.handshake import new_secret
from actors.transfer.meeting import met
from actors.transfer.stream import send
from actors.transfer.transport import Transport, free_port, open_transport
from grpo_dist.batch.sharding import shard
from grpo_dist.config import (
    AlgorithmConfig,
    ModelConfig,
    PolicyConfig,
    ProfileConfig,
    RestartsConfig,
    TimeoutsConfig,
    TransferBackend,
)
from grpo_dist.errors import StateLost, TransferLost
from grpo_dist.health.bounds import Bound
from grpo_dist.observe.profiling import profiled, trace_path
from grpo_dist.policy.extensions import build_in_own_directory
from grpo_dist.policy.loss import LossSettings
from grpo_dist.policy.ranks import Rank
from grpo_dist.policy.trainer import Trainer
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.hardware import DeviceType, one_thread
from grpo_dist.runtime.metering import Metered, metered
from grpo_dist.types import TrainBatch

_WRITING_S = 0.2  # between two questions whether files are written
_SHARDED = "all ranks go back to a checkpoint together"


class PolicyWorker(Metered, Watched):
    """One rank. Its methods are called on all ranks at once; each call runs to its end before the next."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: Any = None
        self._transports: dict[str, Transport] = {}
        self._trace: Path | None = None
        self._profile = ProfileConfig()

    def address(self) -> tuple[str, int]:
        """Where others may meet this rank: its node's address and a free port."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def devices(self) -> Devices:
        """The GPUs that Ray gave this rank."""
        context = ray.get_runtime_context()
        return Devices(context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", [])))

    def start(self, place: Rank, policy: PolicyConfig, settings: dict[str, Any]) -> tuple[DeviceType, float]:
        """Join the other ranks and load the model; returns the device type and `Trainer.attention_cost`.
        ``settings``: the further arguments of `Trainer`.
        """
        build_in_own_directory()
        self._trainer = Trainer(met(place), policy, **settings)
        return self._trainer.device.type, self._trainer.attention_cost

    @metered("update")
    def update(
        self, shards: Sequence[TrainBatch], kl_coef: float | None, bounds: Sequence[Bound]
    ) -> dict[str, float]:
        """``kl_coef``: weight of the KL term in these updates; None: that of the loss settings.
        ``bounds``: no update that passes one is made.
        """
        trace, self._trace = self._trace, None
        with profiled(trace, self._profile):
            return self._trainer.update([replace(shard, kl_coef=kl_coef) for shard in shards], bounds)

    def trace_next(self, run_dir: str, step: int, settings: ProfileConfig) -> None:
        """The next `update`, which is that of ``step``, leaves a trace."""
        self._trace, self._profile = trace_path(Path(run_dir), step, self._trainer.place.rank), settings

    def token_logprobs(self) -> dict[int, np.ndarray]:
        return self._trainer.token_logprobs

    def logprobs(self, shards: Sequence[TrainBatch]) -> tuple[str, dict[int, np.ndarray]]:
        """Name of the policy's dtype, and by row id, float32 [C], its log-probs of the rows of ``shards``."""
        return self._trainer.dtype_name, self._trainer.row_logprobs(shards)

    def parameter_specs(self, adapters_only: bool = False, as_held: bool = False) -> list[ParameterSpec]:
        return self._trainer.parameter_specs(adapters_only=adapters_only, as_held=as_held)

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
        """Gather and, where this rank has a transport for ``group``, send every bucket and then the checksum
        of all; returns the bytes sent and the seconds it took. What fails leaves the group: the others in it
        learn of it at once, and what they were sent is of no use.
        """
        which = {"adapters_only": adapters_only, "as_held": as_held}
        weights = self._trainer.iter_weights(bucket_bytes, **which)
        specs = self._trainer.parameter_specs(**which)
        try:
            with one_thread():
                return send(self._transports.get(group), weights, specs, bucket_bytes)
        except Exception:
            self.close_transfer(group)
            raise

    def offload_states(self) -> None:
        self._trainer.offload_states()

    def reload_states(self) -> None:
        self._trainer.reload_states()

    def save(self, directory: str, beside: bool) -> None:
        self._trainer.save(Path(directory), beside=beside)

    def is_saved(self) -> bool:
        """Called beside an update."""
        return bool(self._trainer.is_saved())

    def load(self, directory: str) -> None:
        self._trainer.load(Path(directory))

    def export(self, directory: str, tokenizer_dir: str) -> None:
        self._trainer.export(Path(directory), tokenizer_dir=tokenizer_dir)


class PolicyGroup:
    """Driver-side handle of all ranks."""

    def __init__(
        self,
        settings: PolicyConfig,
        *,
        model: ModelConfig,
        model_dir: str,
        algorithm: AlgorithmConfig,
        temperature: float,
        token_budget: int | None,
        epochs: int,
        total_updates: int,
        timeouts: TimeoutsConfig,
        seed: int,
        options: dict[str, Any],
        places: Places = None,
        worker: type[PolicyWorker] = PolicyWorker,
        restarts: RestartsConfig | None = None,
        generation: int = 0,
        profile: ProfileConfig | None = None,
    ) -> None:
        """``restarts``: of `Team`; None: nobody watches. ``generation``: so many groups were before it."""
        self._settings, self._timeouts, self._profile = settings, timeouts, profile or ProfileConfig()
        self._arguments = {
            "model": model,
            "model_dir": model_dir,
            "loss": loss_settings(algorithm),
            "temperature": temperature,
            "token_budget": token_budget,
            "epochs": epochs,
            "total_updates": total_updates,
            "seed": seed,
        }
        actor = one_at_a_time(worker)

        def make(place: dict[str, Any], name: str) -> Any:
            # The name of the one before may not be free yet.
            own = f"{name}.{generation}" if generation else name
            return actor.options(name=own, **options | place).remote()

        self.team = Team(
            "policy",
            makers(make, places, settings.num_workers),
            restarts=restarts,
            start_s=timeouts.start_s,
            irreplaceable=_SHARDED,
            told=-min(generation, 1),
        )
        self.ranks = self.team.workers
        self.updates = 0  # so many were asked of the ranks, which do what they are asked in that order
        self.device: DeviceType = "cpu"  # known once `ready`, as is the next
        self._attention_cost = 0.0
        self.sent_after = 0

    async def ready(self) -> None:
        """All ranks joined, model loaded. Raises StateLost where one is lost meanwhile."""
        (host, port), *_ = await results(rank.address.remote() for rank in self.ranks)
        self.team.watch()  # from now on they can be asked, also while they load
        size = len(self.ranks)
        secret = new_secret()
        places = [Rank(i, size, host, port, self._timeouts.update_s, secret) for i in range(size)]
        arguments = [(place, self._settings, self._arguments) for place in places]
        started = await self._answers("start", arguments)
        self.device, self._attention_cost = started[0]
        self.team.starting.clear()

    def stage(self, batches: Sequence[TrainBatch]) -> list[Any]:
        """Each rank's rows of every batch, in the object store: one reference a rank, the same for ranks that
        share sequences. The denominators are the whole batch's.
        """
        replicas, square = self._settings.replicas, self._attention_cost
        shards = zip(*(shard(batch, replicas, square=square) for batch in batches), strict=True)
        staged = [ray.put(list(own)) for own in shards]
        return [own for own in staged for _ in range(self._settings.sequence_parallel)]

    async def update(
        self, staged: Sequence[Any], *, kl_coef: float | None = None, bounds: Sequence[Bound] = ()
    ) -> dict[str, float]:
        """One optimiser update per batch that `stage` was given. ``kl_coef``, ``bounds``: see
        `PolicyWorker.update`.
        """
        arguments = [(own, kl_coef, tuple(bounds)) for own in staged]
        self.updates += 1
        return (await self._on_all("update", arguments, self._timeouts.update_s, "optimiser updates"))[0]

    async def trace_next(self, run_dir: Path, step: int) -> None:
        """The next update leaves a trace of each rank in ``run_dir``, which all ranks can write to."""
        arguments = (str(run_dir.absolute()), step, self._profile)
        ranks = [arguments] * len(self.ranks)
        await self._on_all("trace_next", ranks, self._timeouts.update_s, "the profiler is told")

    async def token_logprobs(self) -> dict[int, np.ndarray]:
        """By row id, float32 [C]: nats of the tokens that the last `update` trained, as `Trainer` noted them.
        Empty where its batches had no row ids.
        """
        asked: list[tuple[Any, ...]] = [()] * len(self.ranks)
        answers = await self._on_all("token_logprobs", asked, self._timeouts.update_s, "log-probs of tokens")
        return {row: values for answer in answers for row, values in answer.items()}

    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]:
        """Of the rows of ``batch``, which have ids: see `PolicyWorker.logprobs`."""
        arguments = [(own,) for own in self.stage([batch])]
        stage = "log-probs of the sync probe"
        answers = await self._on_all("logprobs", arguments, self._timeouts.update_s, stage)
        rows = {row: values for _, own in answers for row, values in own.items()}
        return answers[0][0], rows

    @property
    def update_s(self) -> float:
        """Deadline of one step."""
        return self._timeouts.update_s

    @property
    def adapter_scale(self) -> float | None:
        """What engines multiply the adapters they are sent by; None where whole weights are sent."""
        lora = self._settings.lora
        return lora.scale if lora is not None and lora.sync == "adapter" else None

    async def send_weights(
        self, bucket_bytes: int, *, group: str, adapters_only: bool, as_held: bool = False
    ) -> dict[str, float]:
        """Runs while the others of the transfer group receive; the caller holds the deadline. Returns metrics
        of rank 0. Those sent are the weights after as many `updates` as ``sent_after`` says then.
        """
        self.sent_after = self.updates
        arguments = bucket_bytes, group, adapters_only, as_held
        try:
            return (await self._answers("send_weights", [arguments] * len(self.ranks)))[0]
        except RayTaskError as error:
            if isinstance(error.cause, TransferLost):  # the engines' affair, too
                raise
            raise await self._cause(error, "weights gathered and sent") from error

    async def devices(self) -> list[Devices]:
        """Of each rank; also before `ready`."""
        return await results(rank.devices.remote() for rank in self.ranks)

    async def offload_states(self) -> None:
        """Everything the ranks hold on their GPUs goes to host memory; the caller holds the deadline."""
        await self._answers("offload_states", [()] * len(self.ranks))

    async def reload_states(self) -> None:
        """The reverse of `offload_states`, before anything else is asked of the ranks."""
        await self._answers("reload_states", [()] * len(self.ranks))

    async def save(self, directory: Path, *, beside: bool = False) -> None:
        """``beside``: updates may follow before the files are there, for which `saved` waits."""
        await self._same("save", str(directory.absolute()), beside, stage=f"checkpoint to {directory}")

    async def saved(self) -> None:
        """Returns when every rank has written what it saved last. Raises StateLost when one is gone or late,
        and what went wrong with a file.
        """
        try:
            stage = f"policy: files of {len(self.ranks)} rank(s)"
            async with deadline_of(self.team.named(), self._timeouts.save_s, stage):
                while not all(await self._answers("is_saved", [()] * len(self.ranks), group=BESIDE)):
                    await asyncio.sleep(_WRITING_S)
        except TimeoutError as error:
            raise StateLost(f"{error}: {_SHARDED}") from error

    async def load(self, directory: Path) -> None:
        await self._same("load", str(directory.absolute()), stage=f"restore from {directory}")

    async def export(self, directory: Path, *, tokenizer_dir: Path) -> None:
        arguments = (str(directory.absolute()), str(tokenizer_dir))
        await self._same("export", *arguments, stage=f"export to {directory}")

    async def shutdown(self) -> None:
        await self.team.shutdown()
        kill(self.ranks)

    async def _same(self, method: str, *arguments: Any, stage: str) -> None:
        await self._on_all(method, [arguments] * len(self.ranks), self._timeouts.save_s, stage)

    async def _on_all(
        self, method: str, arguments: list[tuple[Any, ...]], seconds: float, stage: str
    ) -> list[Any]:
        """Raises StateLost when a rank is gone or late, or fails at something that is not in what it was
        asked, and else what a rank raises itself.
        """
        what = f"policy: {stage} on {len(self.ranks)} rank(s)"
        try:
            async with deadline_of(self.team.named(), seconds, what):
                return await self._answers(method, arguments)
        except TimeoutError as error:
            raise StateLost(f"{error}: {_SHARDED}") from error
        except RayTaskError as error:
            raise await self._cause(error, what) from error

    async def _cause(self, error: RayTaskError, what: str) -> Exception:
        """Of a failure on a rank; raises StateLost where it is that another is gone."""
        await self.team.ask_all()
        if isinstance(error.cause, RuntimeError):  # of CUDA, NCCL, gloo, memory
            return StateLost(f"{what}: failed ({reason(error)}): {_SHARDED}")
        return error

    async def _answers(
        self, method: str, arguments: list[tuple[Any, ...]], group: str | None = None
    ) -> list[Any]:
        """Of all ranks. Raises StateLost as soon as one is known to be lost, whoever waits for whom."""
        self.team.check()
        lost = asyncio.create_task(self.team.failed.wait())  # bounded: it ends with the answers
        answers = asyncio.create_task(
            gather(self._answer(i, method, own, group) for i, own in enumerate(arguments)),
            name=f"policy {method}",
        )
        try:
            await asyncio.wait(  # bounded: whoever asks the ranks for something has a deadline for it
                [lost, answers], return_when=asyncio.FIRST_COMPLETED
            )
            self.team.check()
            return await answers
        finally:
            lost.cancel()
            answers.cancel()
            answers.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _answer(self, index: int, method: str, arguments: tuple[Any, ...], group: str | None) -> Any:
        rank = self.ranks[index]
        call = getattr(rank, method)
        try:
            return await (call.options(concurrency_group=group) if group else call).remote(*arguments)
        except LOST as error:
            self.team.lost(index, rank, error)
            self.team.check()
            raise


def loss_settings(algorithm: AlgorithmConfig) -> LossSettings:
    """Config stops here: the maths takes numbers."""
    correction = algorithm.correction
    default = "none" if algorithm.old_logprobs == "rollout" else "tis"
    return LossSettings(
        policy_loss=algorithm.policy_loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        tau_positive=algorithm.tau_positive,
        tau_negative=algorithm.tau_negative,
        ratio_cap=algorithm.ratio_cap,
        old_logprobs=algorithm.old_logprobs,
        top_entropy_share=algorithm.top_entropy_share,
        entropy_coef=algorithm.entropy_coef,
        aggregation=algorithm.aggregation,
        kl_coef=0.0 if algorithm.add_token_level_kl else algorithm.kl.coef,
        kl_estimator=algorithm.kl.estimator,
        correction_kind=correction.kind or default,
        correction_level=correction.level,
        correction_low=correction.low,
        correction_high=correction.high,
        correction_veto=correction.veto,
    )
