"""Problems that rows repeat. DAPO-Math-17k has 1.79 million rows and 17 thousand problems."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from grpo_dist.config import DataConfig, DataSourceConfig
from grpo_dist.data.readers import DataRow, brings_columns

SourceRows = tuple[DataSourceConfig, list[DataRow]]
Pair = tuple[DataRow, DataRow]  # a row, and a later one with its problem


@dataclass(frozen=True, slots=True)
class Duplicates:
    """The rows of some sources without those that repeat an earlier problem, also of another source.

    Attributes:
        first: the first row of each problem, by source.
        rows, repeats: number of all rows, and of those that are not the first of their problem.
        example: one that repeats another; None: there is none.
        disagreements: of each problem that rows give different answers to, two that do.
    """

    first: list[SourceRows]
    rows: int
    repeats: int
    example: Pair | None
    disagreements: list[Pair]

    def warnings(self, key: str, *, deduplicated: bool) -> list[str]:
        """Say what was found, for the configuration's ``key`` of the sources."""
        if self.example is None:
            return []
        row, repeat = self.example
        text = (
            f"warning: {key}: {self.repeats} of {self.rows} rows repeat the problem of an earlier row "
            f"({self.rows - self.repeats} distinct), e.g. {repeat.location} that of {row.location}; "
        )
        remedy = "only the first" if deduplicated else "data.deduplicate=true keeps only the first"
        said = [f"{text}{remedy} of each{' is kept' if deduplicated else ''}"]
        if self.disagreements:
            row, other = self.disagreements[0]
            said.append(
                f"warning: {key}: {len(self.disagreements)} problems have rows with different answers, e.g. "
                f"{row.answer[:40]!r} at {row.location} and {other.answer[:40]!r} at {other.location}; "
                "remove the wrong rows"
            )
        return said


def find_duplicates(data: DataConfig, sources: Sequence[SourceRows]) -> Duplicates:
    """Compare the problems of all rows. White space around a problem does not count; the environment that
    asks it does.
    """
    seen: dict[Hashable, DataRow] = {}
    disagreements: dict[Hashable, Pair] = {}
    first: list[SourceRows] = []
    count, example = 0, None
    for source, rows in sources:
        environment = data.environment_of(source)
        kept = []
        for row in rows:
            key: Hashable = row.problem.strip()
            if row.messages or environment is not None or brings_columns(source):
                parts = [environment, row.messages, row.columns if brings_columns(source) else None]
                key = key, json.dumps(parts, sort_keys=True, default=str)
            earlier = seen.setdefault(key, row)
            if earlier is row:
                kept.append(row)
                continue
            example = example or (earlier, row)
            if earlier.answer != row.answer:
                disagreements.setdefault(key, (earlier, row))
        count += len(rows)
        first.append((source, kept))
    return Duplicates(first, count, count - len(seen), example, list(disagreements.values()))
