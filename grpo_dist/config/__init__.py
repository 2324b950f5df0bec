"""The typed configuration tree. Every section is frozen, refuses unknown keys, and is handed whole to the
part it names.

Reading files, defaults, interpolation and command-line overrides is `config_files.load_config`; this package
is only the shape, the ranges and the cross-checks. It imports neither torch nor ray, so that ``grpo-dist
--help`` stays instant.
"""

from grpo_dist.config.algorithm import KL, Algorithm, Correction
from grpo_dist.config.base import Count, Fraction, NonNegative, Section
from grpo_dist.config.bench import Bench, Lengths
from grpo_dist.config.cluster import Cluster, Grown, Restarts, Timeouts
from grpo_dist.config.data import Batch, Data, DataSource, DynamicSampling, Model, Sampling
from grpo_dist.config.monitoring import Checkpoint, Evaluation, Health, Mlflow, Profile, Tracking, Wandb
from grpo_dist.config.rewards import Gated, Reward, RewardModel, Rewards
from grpo_dist.config.root import Config
from grpo_dist.config.stages import SFT, Demonstrations, Rejection
from grpo_dist.config.workers import (
    LoRA,
    Offload,
    Optimizer,
    Policy,
    Reference,
    Rollout,
    TransferBackend,
    WeightSync,
)

__all__ = [
    "KL",
    "SFT",
    "Algorithm",
    "Batch",
    "Bench",
    "Checkpoint",
    "Cluster",
    "Config",
    "Correction",
    "Count",
    "Data",
    "DataSource",
    "Demonstrations",
    "DynamicSampling",
    "Evaluation",
    "Fraction",
    "Gated",
    "Grown",
    "Health",
    "Lengths",
    "LoRA",
    "Mlflow",
    "Model",
    "NonNegative",
    "Offload",
    "Optimizer",
    "Policy",
    "Profile",
    "Reference",
    "Rejection",
    "Restarts",
    "Reward",
    "RewardModel",
    "Rewards",
    "Rollout",
    "Sampling",
    "Section",
    "Timeouts",
    "Tracking",
    "TransferBackend",
    "Wandb",
    "WeightSync",
]
