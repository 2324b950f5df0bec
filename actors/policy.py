"""Policy workers: one Ray actor per ZeRO rank, and the group that speaks for all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from actors.calls import kill, results
from actors.transport import Transport, free_port, open_transport
from actors.weight_stream import send
from grpo_dist.batching import shard
from grpo_dist.concurrency import deadline
from grpo_dist.config import Algorithm, Model, Policy, Timeouts, TransferBackend
from grpo_dist.hardware import DeviceType, one_thread
from grpo_dist.loss import LossSettings
from grpo_dist.trainer import Rank, Trainer
from grpo_dist.types import TrainBatch
from grpo_dist.weight_buckets import ParameterSpec


class PolicyWorker:
    """One rank. Its methods are called on all ranks at once; each call runs to its end before the next."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._transports: dict[str, Transport] = {}

    def address(self) -> tuple[str, int]:
        """Where others may meet this rank: its node's address and a free port."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def start(self, place: Rank, policy: Policy, **settings: Any) -> str:
        """Join the other ranks and load the model; returns the device type."""
        # DeepSpeed compiles its CPU kernels at first use with the ninja of this very environment.
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._trainer = Trainer(place, policy, **settings)
        return self._trainer.device.type

    def update(self, shards: Sequence[TrainBatch]) -> dict[str, float]:
        return self._trainer.update(shards)

    def parameter_specs(self) -> list[ParameterSpec]:
        return self._trainer.parameter_specs()

    def open_transfer(
        self, *, group: str, backend: TransferBackend, host: str, port: int, world_size: int, timeout_s: float
    ) -> None:
        self._transports[group] = open_transport(
            backend, host, port, rank=0, world_size=world_size, timeout_s=timeout_s
        )

    def send_weights(self, bucket_bytes: int, group: str) -> dict[str, float]:
        """Gather and, on rank 0, send every bucket and then the checksum of all; returns the bytes sent and
        the seconds it took.
        """
        trainer = self._trainer
        weights = trainer.iter_weights(bucket_bytes)
        with one_thread():
            return send(self._transports.get(group), weights, trainer.parameter_specs(), bucket_bytes)

    def save(self, directory: str) -> None:
        self._trainer.save(Path(directory))

    def load(self, directory: str) -> None:
        self._trainer.load(Path(directory))

    def export(self, directory: str, tokenizer_dir: str) -> None:
        self._trainer.export(Path(directory), tokenizer_dir=tokenizer_dir)


class PolicyGroup:
    """Driver-side handle of all ranks."""

    def __init__(
        self,
        settings: Policy,
        *,
        model: Model,
        model_dir: str,
        algorithm: Algorithm,
        temperature: float,
        micro_batch_tokens: int,
        epochs: int,
        total_updates: int,
        timeouts: Timeouts,
        seed: int,
        options: dict[str, Any],
        worker: type[PolicyWorker] = PolicyWorker,
    ) -> None:
        self._settings, self._timeouts = settings, timeouts
        self._arguments = {
            "model": model,
            "model_dir": model_dir,
            "loss": loss_settings(algorithm),
            "temperature": temperature,
            "micro_batch_tokens": micro_batch_tokens,
            "epochs": epochs,
            "total_updates": total_updates,
            "seed": seed,
        }
        actor = ray.remote(worker)
        self.ranks = [
            actor.options(name=f"policy-{rank}", **options).remote() for rank in range(settings.num_workers)
        ]
        self.device: DeviceType = "cpu"  # known once `ready`

    async def ready(self) -> None:
        """All ranks joined, model loaded."""
        host, port = await self.ranks[0].address.remote()
        size = len(self.ranks)
        places = [Rank(i, size, host, port, self._timeouts.update_s) for i in range(size)]
        devices = await results(
            rank.start.remote(place, self._settings, **self._arguments)
            for rank, place in zip(self.ranks, places, strict=True)
        )
        self.device = devices[0]

    async def update(self, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """One optimiser update per batch. Each rank gets its own rows; the denominators are the whole
        batch's.
        """
        shards = list(zip(*(shard(batch, len(self.ranks)) for batch in batches), strict=True))
        results = await self._on_all(
            "update",
            [(list(own),) for own in shards],
            self._timeouts.update_s,
            f"{len(batches)} optimiser update(s)",
        )
        return results[0]

    async def send_weights(self, bucket_bytes: int, *, group: str) -> dict[str, float]:
        """Runs while the others of the transfer group receive; the caller holds the deadline. Returns metrics
        of rank 0.
        """
        return (await results(rank.send_weights.remote(bucket_bytes, group) for rank in self.ranks))[0]

    async def save(self, directory: Path) -> None:
        await self._same("save", str(directory.absolute()), stage=f"checkpoint to {directory}")

    async def load(self, directory: Path) -> None:
        await self._same("load", str(directory.absolute()), stage=f"restore from {directory}")

    async def export(self, directory: Path, *, tokenizer_dir: Path) -> None:
        arguments = (str(directory.absolute()), str(tokenizer_dir))
        await self._same("export", *arguments, stage=f"export to {directory}")

    async def shutdown(self) -> None:
        kill(self.ranks)

    async def _same(self, method: str, *arguments: Any, stage: str) -> None:
        await self._on_all(method, [arguments] * len(self.ranks), self._timeouts.save_s, stage)

    async def _on_all(
        self, method: str, arguments: list[tuple[Any, ...]], seconds: float, stage: str
    ) -> list[Any]:
        async with deadline(seconds, f"policy: {stage} on {len(self.ranks)} rank(s)"):
            return await results(
                getattr(rank, method).remote(*own) for rank, own in zip(self.ranks, arguments, strict=True)
            )


def loss_settings(algorithm: Algorithm) -> LossSettings:
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
