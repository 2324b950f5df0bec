"""The code of a user's own that determines the numbers of a run: part of its identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_dist.config import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    KLConfig,
    RewardsConfig,
    RolloutConfig,
)
from grpo_dist.config.base import choices
from grpo_dist.config.environments import BUILTIN_ENVIRONMENTS
from grpo_dist.environments.registry import own_environments
from grpo_dist.plugins.kinds import (
    ADVANTAGE,
    AGGREGATION,
    ENVIRONMENT,
    KL,
    LOSS,
    METRIC,
    ORDER,
    REWARD,
    SINK,
)  # fmt: skip
from grpo_dist.plugins.names import OwnPiece, shadowing
from grpo_dist.plugins.sources import code_digest
from grpo_dist.rewards.registry import REWARDS, own_rewards


def digest_of_run(pieces: Sequence[OwnPiece], rewards: RewardsConfig, data: DataConfig) -> dict[str, str]:
    """Return `code_digest` of all pieces that determine the numbers of a run: not of metrics and sinks.
    ``pieces``: `Config.own_pieces`.
    """
    own = [*pieces, *own_rewards(rewards), *own_environments(data)]
    return code_digest([piece for piece in own if piece.kind not in (METRIC, SINK)], rewards.code_paths)


def digest_of_samples(rollout: RolloutConfig, rewards: RewardsConfig, data: DataConfig) -> dict[str, str]:
    """Return `code_digest` of the pieces that determine samples of a model and their rewards."""
    own = [*rollout.own_pieces, *own_rewards(rewards), *own_environments(data)]
    return code_digest(own, rewards.code_paths)


def shadowed() -> Iterator[str]:
    """Yield a warning for every installed package that registers the name of a built-in piece."""
    builtin = {
        ADVANTAGE: choices(AlgorithmConfig, "advantage"),
        LOSS: choices(AlgorithmConfig, "policy_loss"),
        KL: choices(KLConfig, "estimator"),
        AGGREGATION: choices(AlgorithmConfig, "aggregation"),
        ORDER: choices(DataConfig, "order"),
        ENVIRONMENT: BUILTIN_ENVIRONMENTS,
        REWARD: tuple(REWARDS),
    }
    for kind, names in builtin.items():
        yield from shadowing(kind, names)


def check_code(checkpoint: Path, changed: Sequence[str], settings: CheckpointConfig) -> None:
    """Raise ValueError where own code has ``changed`` since ``checkpoint``, unless that may be."""
    if changed and settings.changed_code == "refuse":
        raise ValueError(
            f"{checkpoint}: your own code has changed since it was written: {', '.join(changed)}. The "
            "numbers of the run would come from two programs. Restore the code, choose another `name`, or "
            "set `checkpoint.changed_code=warn` or `checkpoint.resume=never`"
        )
