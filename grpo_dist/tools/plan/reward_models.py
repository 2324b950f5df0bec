"""Reward models of a plan: their sizes, and the memory and operations of a worker.

padded rows: problem | completion | padding     as many at once as fit `micro_batch_tokens`
weights | activations | attention mask | runtime     memory of a worker
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_dist.batch.sharding import micro_batches
from grpo_dist.config import RewardModelConfig, RewardsConfig
from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.memory import GPU_RUNTIME, Footprint, Sizes, itemsize_of
from grpo_dist.tools.plan.models import ModelShape, classifier_of

_CPU_RUNTIME = round(0.6 * GIB)  # of a process with torch and transformers: as a reference worker


@dataclass(frozen=True, slots=True)
class KnownRewardModel:
    """A reward model with the sizes of its decoder."""

    settings: RewardModelConfig
    shape: ModelShape

    def weight_bytes(self, *, gpu: bool) -> int:
        """Return the bytes on one device. A split model has its embedding on each."""
        split = self.shape.without_head - self.shape.embedding
        own = self.shape.embedding + -(-split // self.settings.tensor_parallel_size)
        return own * itemsize_of(self.settings.dtype, gpu=gpu)

    def alone(self) -> KnownRewardModel:
        """Return it with a whole GPU, as a copy has it that takes turns with other roles."""
        return replace(self, settings=self.settings.model_copy(update={"gpu_share": 1.0}))

    def flops(self, prompt: int, lengths: Sequence[int]) -> float:
        """Return the operations of one prompt with completions of ``lengths`` tokens, batched as `Classifier`
        does. Padding counts; the head, one or two rows, does not.
        """
        s, rows = self.shape.shape, [prompt + length for length in lengths]
        total = 0.0
        for batch in micro_batches(rows, self.settings.micro_batch_tokens):
            longest = max(rows[i] for i in batch)
            weights = s.layers * s.layer_weights * longest
            pairs = longest * (longest + 1) / 2
            total += len(batch) * (2 * weights + 4 * s.layers * s.heads * s.head_dim * pairs)
        return total


def reward_models_of(rewards: RewardsConfig) -> tuple[tuple[KnownRewardModel, ...], dict[str, str]]:
    """Return the reward models with known sizes, and by name why the others' are unknown."""
    known, unknown = [], {}
    for settings in rewards.models:
        try:
            known.append(KnownRewardModel(settings, classifier_of(settings)))
        except UserError as error:
            unknown[settings.name] = str(error)
    return tuple(known), unknown


def role_of(settings: RewardModelConfig) -> str:
    """Return its row in a table of memory."""
    return f"reward model {settings.name}"


def reward_model_worker(max_length: int, model: KnownRewardModel, sizes: Sizes) -> Footprint:
    """Return the largest memory of a worker on one GPU: with a full batch of the longest rows.

    No layer keeps activations. The mask of padded rows is [rows, 1, T, T], once of a byte and once
    of the weights' type; with a mask the heads of keys and values are repeated to those of the queries.
    """
    s, b = model.shape.shape, itemsize_of(model.settings.dtype, gpu=sizes.gpu)
    tokens = max(model.settings.micro_batch_tokens, max_length)
    split = model.settings.tensor_parallel_size
    widest = -(-max(3 * s.intermediate, 4 * s.heads * s.head_dim) // split) + 3 * s.hidden
    return Footprint(
        {
            "weights": model.weight_bytes(gpu=sizes.gpu),
            "activations": tokens * widest * b,
            "attention mask": tokens * max_length * (1 + b),
            "runtime": GPU_RUNTIME if sizes.gpu else _CPU_RUNTIME,
        }
    )
