"""Ranks of a trainer, each in its process: gradients, log-probs, seconds and memory of an update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.transfer.transport import free_port
from grpo_dist.batch.rows import make_batch
from grpo_dist.config import AlgorithmConfig, Config, ModelConfig, PolicyConfig
from grpo_dist.demo.model import random_model
from grpo_dist.policy.extensions import build_in_own_directory
from grpo_dist.policy.loss import Objective
from grpo_dist.policy.trainer import Trainer, TrainerSettings
from grpo_dist.policy.weight_buckets import Checksum
from grpo_dist.runtime.hardware import available_cpus, device_type
from grpo_dist.runtime.metering import Stopwatch
from grpo_dist.runtime.processes import freeze_loaded
from grpo_dist.runtime.rendezvous import Rank
from grpo_dist.tools.bench.limit_jobs import Barrier
from grpo_dist.tools.bench.limits import run_jobs
from grpo_dist.types import Group, Prompt, Rollout, TrainBatch
from tests.gpu.device import peak_bytes_of, seconds_of, synchronize
from tests.gpu.sizes import UpdateSize

_ROWS = 8  # rows whose log-probs are compared
_ELEMENTS = 2**16  # elements of each gradient that are compared
_COLLECTIVE_S = 60.0
_TIMES = 2  # timed updates, and turns of the states


@dataclass(frozen=True, slots=True)
class TrainerSections:
    """The configuration of a trainer, which is sent to the processes of the ranks."""

    policy: PolicyConfig
    model: ModelConfig
    settings: TrainerSettings


@dataclass(frozen=True, slots=True)
class Ranks:
    """``index`` of ``count`` ranks, which meet at ``port`` of this machine."""

    index: int
    count: int
    port: int


def measure(
    barrier: Barrier, *, sections: TrainerSections, model_dir: str, ranks: Ranks,
    size: UpdateSize | None = None, timed: bool = False, batch: TrainBatch | None = None,
) -> Any:  # fmt: skip
    """Return the log-probs of ``batch``, float32 [B, T], nats, of the tokens in its loss mask. Without it:
    `norm`, `logprobs` and `gradients` of a first update; if ``timed``, also the seconds and the peak bytes of
    a later one, and the results of moving the states. Peaks and moves are measured on GPUs only.
    """
    build_in_own_directory()
    rank = Rank(ranks.index, ranks.count, "127.0.0.1", ranks.port, _COLLECTIVE_S)
    settings = sections.settings
    trainer = Trainer(rank, sections.policy, model=sections.model, model_dir=model_dir, settings=settings)
    if batch is not None:
        logprobs: np.ndarray = trainer.logprobs(batch)[0].numpy()
        trainer.close()
        return logprobs
    assert size is not None
    freeze_loaded()  # as a run's worker does
    batch = made_batch(size, trainer.engine.module.model.config.vocab_size)
    rows = batch.select(list(range(_ROWS)))
    results: dict[str, Any] = {"logprobs": trainer.logprobs(rows)[0][rows.policy.mask].numpy()}
    trainer.accumulate(batch)
    results["gradients"] = {name: _every_nth(gradient) for name, gradient in trainer.gradients().items()}
    results["norm"] = trainer.step()["policy/grad_norm"]
    if timed:
        results |= _time_updates(trainer, batch) | _move_states(trainer, batch)
        results["after"] = trainer.update([batch])["policy/grad_norm"]
    barrier.wait()  # bounded: it ends with its parent
    trainer.close()
    return results


def made_batch(size: UpdateSize, vocabulary: int) -> TrainBatch:
    """Return rows of random tokens, with rewards that differ within each group."""
    generator = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return generator.integers(vocabulary, size=count, dtype=np.int32)

    groups, advantages = [], []
    for i in range(size.prompts):
        prompt = Prompt(f"p{i}", tokens(size.prompt), "", "gpu-check")
        rollouts = tuple(
            Rollout(
                prompt.uid, sample, tokens(size.completion),
                np.full(size.completion, -np.log(vocabulary), np.float32), "length", "",
                np.zeros(size.completion, np.int32),
            )
            for sample in range(size.samples)
        )  # fmt: skip
        rewards = np.arange(size.samples, dtype=np.float32) % 2
        groups.append(Group(prompt, rollouts, rewards, {}, ("",) * size.samples))
        advantages.append(2 * rewards - 1)
    return make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=size.completion)


def _every_nth(gradient: Tensor) -> np.ndarray:
    flat = gradient.flatten()
    elements: np.ndarray = flat[:: max(1, len(flat) // _ELEMENTS)].numpy().copy()
    return elements


def _time_updates(trainer: Trainer, batch: TrainBatch) -> dict[str, Any]:
    """Time updates. The optimiser's states exist already, so they are like all later updates."""
    seconds = [seconds_of(lambda: trainer.update([batch])) for _ in range(_TIMES)]
    before = torch.cuda.memory_allocated() if device_type() == "cuda" else 0
    peak = before + peak_bytes_of(lambda: trainer.update([batch]))
    return {"update_s": min(seconds), "peak_bytes": peak}


def _move_states(trainer: Trainer, batch: TrainBatch) -> dict[str, Any]:
    """Return seconds and freed bytes of moving the states away and back after an update, as in a run, and
    whether they are unchanged. `offload_parts`: seconds of the last offload by part, as metrics.
    """
    on_gpu, same = device_type() == "cuda", True
    results: dict[str, Any] = {"offload_s": [], "reload_s": []}
    for _ in range(_TIMES):  # the first allocates the buffers in host memory
        trainer.update([batch])  # leaves its activations in torch's cache
        before, watch = _digest(trainer), Stopwatch()
        held, cached = _bytes_on_gpu() if on_gpu else (0, 0)
        results["offload_s"].append(seconds_of(partial(trainer.memory.offload, timed=watch)))
        left, left_cached = _bytes_on_gpu() if on_gpu else (0, 0)
        results |= {"moved_bytes": held - left, "freed_bytes": cached - left_cached}
        results["offload_parts"] = watch.phases()
        results["reload_s"].append(seconds_of(trainer.memory.reload))
        same = same and _digest(trainer) == before
    synchronize()
    return results | {"same": same, "tensors": len(before)}


def _bytes_on_gpu() -> tuple[int, int]:
    """Return the bytes of tensors, and the bytes that torch has reserved on the GPU."""
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _digest(trainer: Trainer) -> list[int]:
    """Return checksums of all weights, and of the optimiser's weights and states."""
    checksums = [_checksum(t) for bucket in trainer.weights.buckets(1 << 28) for _, t in bucket]
    optimizer = getattr(trainer.engine.optimizer, "optimizer", trainer.engine.optimizer)
    for parameter, state in optimizer.state.items():  # ZeRO-3 empties `param_groups` after each step
        tensors = [parameter.data, *(value for value in state.values() if isinstance(value, Tensor))]
        checksums += [_checksum(t) for t in tensors if t.numel()]
    return checksums


def _checksum(tensor: Tensor) -> int:
    checksum = Checksum()
    checksum.add(tensor.detach().contiguous().flatten().view(torch.uint8))
    return checksum.value


def model_dir_of(model: ModelConfig, seed: int) -> str:
    """Return the directory of the measured model, created if missing."""
    return str(random_model(Path(model.path.removeprefix("random:")), seed=seed))


def trainer_sections(config: Config) -> TrainerSections:
    """Return the configuration of the trainer of a run with ``config``."""
    settings = TrainerSettings(
        objective=Objective(AlgorithmConfig(correction="none")),
        temperature=config.sampling.first_temperature, token_budget=config.batch.micro_batch_tokens, epochs=1,
        total_updates=10, seed=config.seed,
    )  # fmt: skip
    return TrainerSections(config.policy, config.model, settings)


def run_trainers(sections: TrainerSections, size: UpdateSize, *, timed: bool = False) -> list[dict[str, Any]]:
    """Run `measure` on all ranks of the policy; return the results of each."""
    count, port = sections.policy.num_workers, free_port("127.0.0.1")
    model_dir = model_dir_of(sections.model, sections.settings.seed)
    common = {"sections": sections, "model_dir": model_dir, "size": size, "timed": timed}
    jobs = [{"ranks": Ranks(index, count, port), **common} for index in range(count)]
    threads = max(1, available_cpus() // count)
    return run_jobs(measure, jobs, threads=threads, gpus=1)


def trainer_logprobs(sections: TrainerSections, batch: TrainBatch) -> np.ndarray:
    """Return the trainer's log-probs of the tokens in the loss mask of ``batch``, float32 [B, T]."""
    model_dir = model_dir_of(sections.model, sections.settings.seed)
    ranks = Ranks(0, 1, free_port("127.0.0.1"))
    job = {"sections": sections, "model_dir": model_dir, "ranks": ranks, "batch": batch}
    (logprobs,) = run_jobs(measure, [job], threads=available_cpus(), gpus=1)
    return logprobs
