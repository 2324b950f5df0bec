"""Columns of the data that built-in rewards read by name: they are checked before anything is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.builtin import Builtin
from grpo_dist.rewards.registry import REWARDS, make, reward_specs


class HasColumns(Protocol):
    """A row of a data source; ``location`` is for messages: ``code.jsonl:17``."""

    @property
    def source(self) -> str: ...

    @property
    def location(self) -> str: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


def column_problems(settings: RewardsConfig, rows: Sequence[HasColumns], key: str) -> Iterator[str]:
    """Yield a message for every built-in reward that lacks a column in one of ``rows``, or cannot read it.

    Args:
        rows: of one source.
        key: of the source in the configuration, ``data.train.0``.
    """
    if not rows:
        return
    for spec in reward_specs(settings.of(rows[0].source)):
        if spec.function in REWARDS and (reward := make(spec)).data_columns:
            yield from _problems(spec.name, reward, rows, key)


def _problems(name: str, reward: Builtin, rows: Sequence[HasColumns], key: str) -> Iterator[str]:
    missing = False
    for column in reward.data_columns:
        lacking = next((row for row in rows if column != "problem" and column not in row.columns), None)
        if lacking is not None:
            missing = True
            yield (
                f"reward {name} reads column `{column}`, but {lacking.location} has only "
                f"{', '.join(sorted({'problem', *lacking.columns}))}: add it to `{key}.columns`, correct the "
                f"kwargs of the reward, or give source {lacking.source} other rewards in `rewards.by_source`"
            )
    for row in () if missing else rows:
        try:
            reward.check_row(row.columns)
        except ValueError as error:
            yield f"reward {name}: {row.location}: {error}"
            return
