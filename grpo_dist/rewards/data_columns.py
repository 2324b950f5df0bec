"""Columns of the data that built-in rewards read by name: a name that no row has is a mistake, no value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.registry import REWARDS, make, reward_specs
from grpo_dist.types import Prompt


def column_problems(settings: RewardsConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a message for every column that a reward reads and no prompt has, of those that it scores."""
    read = {source: _columns_read(own) for source, own in settings.variants.items()}
    if not any(read.values()):
        return
    known: dict[str, set[str]] = {source: {"problem"} for source in read}
    for prompt in prompts:
        known[prompt.source if prompt.source in known else ""].update(prompt.columns)
    scored = {prompt.source if prompt.source in read else "" for prompt in prompts}
    for source in (source for source in read if source in scored):
        for reward, column in read[source]:
            if column not in known[source]:
                of = f" of source {source}" if source else ""
                yield (
                    f"reward {reward} reads column `{column}`, but no prompt{of} has it; their columns are "
                    f"{', '.join(sorted(known[source]))}: add it to `columns` of the source in `data.train`, "
                    "or correct the kwargs of the reward"
                )


def _columns_read(settings: RewardsConfig) -> list[tuple[str, str]]:
    """Return name and column of every built-in reward that names columns."""
    return [
        (spec.name, column)
        for spec in reward_specs(settings)
        if spec.function in REWARDS
        for column in make(spec).data_columns
    ]
