"""Columns of the data that rewards read by name: they are checked before anything is sampled or scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.builtin import Builtin
from grpo_dist.rewards.group import named_columns
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.registry import REWARDS, make, own_function, reward_specs


class HasColumns(Protocol):
    """A row of a data source; ``location`` is for messages: ``code.jsonl:17``."""

    @property
    def source(self) -> str: ...

    @property
    def location(self) -> str: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...


def column_problems(settings: RewardsConfig, rows: Sequence[HasColumns], remedy: str) -> Iterator[str]:
    """Yield a message for every built-in reward that lacks a column in one of ``rows``, or cannot read it.

    Args:
        rows: of one source.
        remedy: how a row gets a column: ``add it to `data.train.0.columns` ``.
    """
    if not rows:
        return
    for spec in reward_specs(settings.of(rows[0].source)):
        if spec.function in REWARDS and (reward := make(spec)).data_columns:
            yield from _problems(spec.name, reward, rows, remedy)


def own_column_problems(
    settings: RewardsConfig, rows: Sequence[HasColumns], remedy: str, pool: GraderPool
) -> Iterator[str]:
    """Yield a message for every column that a user's function needs and one of ``rows`` lacks.

    Loads the functions in ``pool``. Arguments as of `column_problems`.
    """
    for spec in reward_specs(settings.of(rows[0].source)) if rows else ():
        if spec.function not in REWARDS:
            yield from _missing(spec.name, own_function(spec, pool).data_columns, rows, remedy)


def asked_columns(settings: RewardsConfig) -> frozenset[str]:
    """Return the columns that users' functions name as parameters: rows keep them, if they have them.

    Loads the functions. One that cannot be loaded asks for nothing here: `reward_problems` reports it.
    """
    specs = {spec.function: spec for own in settings.variants.values() for spec in reward_specs(own)}
    asked: set[str] = set()
    if custom := [spec for function, spec in specs.items() if function not in REWARDS]:
        with GraderPool(1, code_paths=settings.code_paths) as pool:
            for spec in custom:
                with suppress(ValueError):
                    asked |= own_function(spec, pool).asked_columns
    return frozenset(asked)


def _missing(name: str, columns: Sequence[str], rows: Sequence[HasColumns], remedy: str) -> Iterator[str]:
    for column in columns:
        lacking = next(
            (row for row in rows if column != "problem" and column not in named_columns(row.columns)), None
        )
        if lacking is not None:
            other = f"give source {lacking.source} other rewards in `rewards.by_source`"
            yield (
                f"reward {name} reads column `{column}`, but {lacking.location} has only "
                f"{', '.join(sorted({'problem', *lacking.columns}))}: {remedy}, correct the kwargs of the "
                f"reward, or {other if lacking.source else 'choose another reward'}"
            )


def _problems(name: str, reward: Builtin, rows: Sequence[HasColumns], remedy: str) -> Iterator[str]:
    missing = list(_missing(name, reward.data_columns, rows, remedy))
    yield from missing
    for row in () if missing else rows:
        try:
            reward.check_row(named_columns(row.columns))
        except ValueError as error:
            yield f"reward {name}: {row.location}: {error}"
            return
