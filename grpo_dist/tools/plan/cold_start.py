"""Memory of a cold start (`model.path: sft`): one process in float32, before any worker is started.

weights | gradients | optimiser (two moments) | activations of a whole batch | logits | runtime
"""

from __future__ import annotations

from dataclasses import replace

from grpo_dist.config import ModelConfig, SFTConfig
from grpo_dist.runs.cold_start import LOGIT_TOKENS
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.accelerators import ClusterShape
from grpo_dist.tools.plan.memory import CPU_RUNTIME, GPU_RUNTIME, USABLE, Footprint, Sizes, activation_bytes
from grpo_dist.tools.plan.models import ModelShape

ROLE = "cold start"
_FLOAT32 = 4


def is_trained_first(model: ModelConfig, sft: SFTConfig | None) -> bool:
    return model.path == "sft" and sft is not None


def cold_start(sft: SFTConfig, model: ModelShape, sizes: Sizes, *, longest: int | None = None) -> Footprint:
    """Return the memory of supervised training, which computes each batch at once and keeps all activations.

    ``longest``: tokens of the longest demonstration; None: `sft.max_length`, the most that it may be.
    """
    sizes = replace(sizes, itemsize=_FLOAT32)
    tokens = sft.batch_size * (longest or sft.max_length)
    block = min(tokens, LOGIT_TOKENS) * model.shape.vocabulary * _FLOAT32
    return Footprint(
        {
            "weights": _FLOAT32 * model.parameters,
            "gradients": _FLOAT32 * model.parameters,
            "optimiser": 2 * _FLOAT32 * model.parameters,
            "activations": activation_bytes(
                model,
                sizes,
                tokens=tokens,
                attended=tokens,
                longest=longest or sft.max_length,
                checkpointing=False,
            ),
            "logits": 2 * block + _FLOAT32 * model.embedding,
            "runtime": round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["policy"]),
        }
    )


def cold_start_problem(need: Footprint, cluster: ClusterShape) -> str | None:
    """Return why it does not fit on a GPU of ``cluster``, and the remedy."""
    if cluster.card is None or need.total <= (limit := int(cluster.card.memory * USABLE)):
        return None
    return (
        f"{ROLE}: {need.total / GIB:.1f} GiB on one GPU, and a {cluster.card.name} has {limit / GIB:.1f} GiB "
        "for it; lower `sft.batch_size` or `sft.max_length`, or make it an sft stage of a pipeline, which "
        "trains on the ranks of `policy`"
    )
