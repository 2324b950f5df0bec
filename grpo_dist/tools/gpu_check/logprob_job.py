"""The trainer's log-probs of given rows, in a process of their own."""

from __future__ import annotations

import numpy as np

from grpo_dist.tools.bench.child import Barrier
from grpo_dist.tools.gpu_check.trainer_job import Ranks, TrainerSections, make_trainer
from grpo_dist.types import TrainBatch


def measure(
    barrier: Barrier, *, sections: TrainerSections, model_dir: str, port: int, batch: TrainBatch
) -> np.ndarray:
    """Return float32 [B, T], nats, of the tokens in the loss mask of ``batch``."""
    trainer = make_trainer(sections, model_dir, Ranks(0, 1, port))
    found: np.ndarray = trainer.logprobs(batch)[0].numpy()
    trainer.close()
    return found
