"""The scorers of sources with rewards of their own, which share the servers that they ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import Scorer, model_terms, reward_specs


def scorers_by_source(
    variants: Mapping[str, RewardsConfig],
    pool: GraderPool,
    *,
    workers: int,
    outcome_rewards: Mapping[Any, float] | None = None,
) -> dict[str, Scorer]:
    """Return a scorer for each source.

    Args:
        variants: the rewards of each source.
        workers: processes or threads of the run that have such scorers, and share what a server allows.
        outcome_rewards: as of `Scorer`.

    Raises:
        ValueError: as `Scorer`.
    """
    specs = {source: reward_specs(own) for source, own in variants.items()}
    holders = Counter(spec.name for own in specs.values() for spec in own)
    sharing = {name: workers * count for name, count in holders.items()}
    return {
        source: Scorer(
            specs[source],
            pool,
            models=model_terms(own),
            sharing=sharing,
            outcome_rewards=outcome_rewards,
        )
        for source, own in variants.items()
    }
