"""The kinds of pieces that a user may bring. Imports no torch: the configuration reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind.

    Attributes:
        title: as messages name it.
        key: of the configuration that names a piece of this kind.
        group: of the entry points by which an installed package registers such pieces.
    """

    title: str
    key: str
    group: str


ADVANTAGE = Kind("advantage estimator", "algorithm.advantage", "grpo_dist.advantages")
LOSS = Kind("policy loss", "algorithm.policy_loss", "grpo_dist.losses")
KL = Kind("KL estimator", "algorithm.kl.estimator", "grpo_dist.kl_estimators")
AGGREGATION = Kind("aggregation", "algorithm.aggregation", "grpo_dist.aggregations")
METRIC = Kind("metric", "tracking.metrics", "grpo_dist.metrics")
SINK = Kind("sink", "tracking.sinks", "grpo_dist.sinks")
SOURCE = Kind("data source", "data.train.N.path", "grpo_dist.data_sources")
ORDER = Kind("prompt order", "data.order", "grpo_dist.orders")
ROLLOUT = Kind("rollout function", "rollout.function", "grpo_dist.rollouts")
ENVIRONMENT = Kind("environment", "data.environment", "grpo_dist.environments")
REWARD = Kind("reward function", "rewards.functions.N.function", "grpo_dist.rewards")

KINDS = (
    ADVANTAGE, LOSS, KL, AGGREGATION, METRIC, SINK, SOURCE, ORDER, ROLLOUT, ENVIRONMENT, REWARD,
)  # fmt: skip
