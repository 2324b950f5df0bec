"""The records that flow through one step: Prompt -> Rollout -> Group -> TrainBatch.

Each is frozen and complete when made; no field is filled in later. They hold numpy until batching.
"""

from grpo_dist.types.rows import EpochUpdate, PreparedBatch, Rows, StepBatch, TrainBatch
from grpo_dist.types.samples import (
    NO_THOUGHT,
    FurtherRow,
    Group,
    HeldRoutes,
    Prompt,
    Rollout,
    Routes,
    Sampling,
    Task,
    TeacherLogprobs,
    Thought,
    ToolCall,
    Turn,
    correctness,
    count_signals,
    has_signal,
    pack_rollouts,
    select_sampled,
    training_rows,
    unpack_rollouts,
)

__all__ = [
    "NO_THOUGHT",
    "EpochUpdate",
    "FurtherRow",
    "Group",
    "HeldRoutes",
    "PreparedBatch",
    "Prompt",
    "Rollout",
    "Routes",
    "Rows",
    "Sampling",
    "StepBatch",
    "Task",
    "TeacherLogprobs",
    "Thought",
    "ToolCall",
    "TrainBatch",
    "Turn",
    "correctness",
    "count_signals",
    "has_signal",
    "pack_rollouts",
    "select_sampled",
    "training_rows",
    "unpack_rollouts",
]
