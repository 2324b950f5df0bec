"""Runs the ranks of a trainer, each in a process of its own, one after the other or together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from actors.transfer.transport import free_port
from grpo_dist.config import Config, ModelConfig
from grpo_dist.demo.model import random_model
from grpo_dist.policy.loss import LossSettings
from grpo_dist.policy.trainer import TrainerSettings
from grpo_dist.runtime.hardware import available_cpus
from grpo_dist.tools.bench.limits import run_jobs
from grpo_dist.tools.gpu_check.sizes import UpdateSize
from grpo_dist.tools.gpu_check.trainer_job import Ranks, TrainerSections
from grpo_dist.types import TrainBatch


def model_dir_of(model: ModelConfig, seed: int) -> str:
    """Return the directory of the measured model, which is made if it is not there."""
    return str(random_model(Path(model.path.removeprefix("random:")), seed=seed))


def trainer_sections(config: Config) -> TrainerSections:
    """Return what the trainer of a run with ``config`` is made from."""
    settings = TrainerSettings(
        loss=LossSettings(),
        temperature=config.sampling.first_temperature,
        token_budget=config.batch.micro_batch_tokens,
        epochs=1,
        total_updates=10,
        seed=config.seed,
    )
    return TrainerSections(config.policy, config.model, settings)


def run_trainers(sections: TrainerSections, size: UpdateSize, *, timed: bool = False) -> list[dict[str, Any]]:
    """Run `trainer_job.measure` on all ranks of the policy; return what each found."""
    count, port = sections.policy.num_workers, free_port("127.0.0.1")
    model_dir = model_dir_of(sections.model, sections.settings.seed)
    common = {"sections": sections, "model_dir": model_dir, "size": size, "timed": timed}
    jobs = [{"ranks": Ranks(index, count, port), **common} for index in range(count)]
    threads = max(1, available_cpus() // count)
    return run_jobs("grpo_dist.tools.gpu_check.trainer_job", jobs, threads=threads, gpus=1)


def trainer_logprobs(sections: TrainerSections, batch: TrainBatch) -> np.ndarray:
    """Return the trainer's log-probs of the tokens in the loss mask of ``batch``, float32 [B, T]."""
    model_dir = model_dir_of(sections.model, sections.settings.seed)
    job = {"sections": sections, "model_dir": model_dir, "port": free_port("127.0.0.1"), "batch": batch}
    found: list[np.ndarray] = run_jobs(
        "grpo_dist.tools.gpu_check.logprob_job", [job], threads=available_cpus(), gpus=1
    )
    return found[0]
