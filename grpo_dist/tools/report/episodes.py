"""Episodes in a table of samples: turns, tool calls, and given tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

COLUMNS = ("turns", "sampled", "further_rows")
NO_CALL = "none"
VALUES = ("logprobs", "advantages", "trainer_logprobs", "ref_logprobs")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of samples with recorded values; a sample's rows are consecutive.

    Args:
        ids: int [N].
        sampled: bool [N]; False: given, not sampled by the policy.
        values: float [N] by column name; NaN if not recorded.
        recorded: bool [R] by column name, for each of the R rows.
        row_begins: int [R + 1], the first token of each row, and N.
        sample_rows: int [S + 1], the first row of each sample, and R.
    """

    ids: np.ndarray
    sampled: np.ndarray
    values: Mapping[str, np.ndarray]
    recorded: Mapping[str, np.ndarray]
    row_begins: np.ndarray
    sample_rows: np.ndarray

    @property
    def sample_begins(self) -> np.ndarray:
        """Index of each sample's first token, and N: int [S + 1]."""
        return self.row_begins[self.sample_rows]

    def row_starts(self) -> list[list[int]]:
        """Return each row's start, relative to its sample's first token."""
        begins, rows = self.row_begins.tolist(), self.sample_rows.tolist()
        return [[begin - begins[a] for begin in begins[a:b]] for a, b in pairwise(rows)]

    def given_ranges(self) -> list[list[int]]:
        """Return start and end of each given span per sample, in a flat list."""
        ranges: list[list[int]] = [[] for _ in self.sample_rows[1:]]
        begins = self.sample_begins
        for i in np.unique(np.searchsorted(begins, np.flatnonzero(~self.sampled), "right") - 1).tolist():
            is_given = ~self.sampled[begins[i] : begins[i + 1]]
            ranges[i] = np.flatnonzero(np.diff(is_given, prepend=False, append=False)).tolist()
        return ranges

    def last_actions(self) -> Iterator[np.ndarray]:
        """Yield the token ids of each sample's last action, which `completion` contains as text."""
        for row in (self.sample_rows[1:] - 1).tolist():
            begin, end = self.row_begins[row : row + 2]
            positions = np.flatnonzero(~self.sampled[begin:end])
            yield self.ids[begin + positions[-1] + 1 : end] if len(positions) else self.ids[begin:end]


def turns_of(table: pa.Table) -> list[list[dict[str, Any]] | None]:
    """Return the turns of each sample; None if it is not an episode."""
    return [turns or None for turns in table["turns"].to_pylist()]


def call_outcomes(turns: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return the outcomes of all tool calls of an episode, e.g. "ok, timeout"; "none" without a call."""
    if turns is None:
        return None
    outcomes = {call["outcome"] for turn in turns for call in turn["calls"] or ()}
    return ", ".join(sorted(outcomes)) or NO_CALL


def call_count(turns: Sequence[Mapping[str, Any]] | None) -> int | None:
    return None if turns is None else sum(len(turn["calls"] or ()) for turn in turns)


def read_tokens(table: pa.Table) -> Tokens:
    """Read the training rows of all samples. Raises ValueError if values and tokens differ in number."""
    more = [rows or [] for rows in table["further_rows"].to_pylist()]

    def rows_of(name: str) -> list[Any]:
        first = lists_of(table, name)
        if not any(more):
            return first
        rest = ([row.get(name) for row in rows] for rows in more)
        return [row for one, others in zip(first, rest, strict=True) for row in (one, *others)]

    ids = [() if row is None else row for row in rows_of("completion_ids")]
    row_begins = np.cumsum([0, *map(len, ids)])
    columns = {name: rows_of(name) for name in ("sampled", *VALUES)}
    return Tokens(
        ids=_flat(ids, row_begins, np.int64, 0),
        sampled=_flat(columns.pop("sampled"), row_begins, bool, True),
        values={name: _flat(rows, row_begins, np.float64, np.nan) for name, rows in columns.items()},
        recorded={name: np.array([row is not None for row in rows]) for name, rows in columns.items()},
        row_begins=row_begins,
        sample_rows=np.cumsum([0, *(1 + len(rows) for rows in more)]),
    )


def given_counts(table: pa.Table) -> list[int]:
    """Return the number of given tokens per sample, over all its rows."""
    further = table["further_rows"].to_pylist()
    sample_masks = [[mask, *(row["sampled"] for row in more or ())]
           for mask, more in zip(lists_of(table, "sampled"), further, strict=True)]  # fmt: skip
    return [sum(len(m) - int(np.sum(m)) for m in masks if m is not None) for masks in sample_masks]


def lengths_of(table: pa.Table) -> list[int | None]:
    """Return the tokens per completion; for episodes the sampled and given tokens of all rows."""
    lengths = pc.list_value_length(table["completion_ids"]).to_pylist()
    further = table["further_rows"].to_pylist()
    return [
        None if length is None else length + sum(len(row["completion_ids"]) for row in more or ())
        for length, more in zip(lengths, further, strict=True)
    ]


def lists_of(table: pa.Table, name: str) -> list[np.ndarray | None]:
    """Read a list column as one array per row; None for all rows if the column is missing."""
    if name not in table.schema.names:
        return [None] * len(table)
    column = table[name].combine_chunks()
    values, ends = to_numpy(column.values), to_numpy(column.offsets)
    is_valid = column.is_valid().to_pylist()
    return [values[a:b] if ok else None for a, b, ok in zip(ends[:-1], ends[1:], is_valid, strict=True)]


def to_numpy(values: pa.Array) -> np.ndarray:
    """Convert numbers or booleans, NaN for null, without pandas, which `pa.Array.to_numpy` imports."""
    if values.null_count:
        return np.array([np.nan if value is None else value for value in values.to_pylist()])
    if pa.types.is_boolean(values.type):
        return np.from_dlpack(values.cast(pa.uint8())).view(bool)
    return np.from_dlpack(values)


def _flat(rows: Sequence[Any], begins: np.ndarray, dtype: Any, missing: float) -> np.ndarray:
    """Join ``rows`` that start at ``begins``; a row that is None is filled with ``missing``."""
    flat = np.full(begins[-1], missing, dtype)
    present = [np.array(row, dtype) if isinstance(row, list) else row for row in rows if row is not None]
    if present:
        lengths = np.diff(begins)
        is_present = np.array([row is not None for row in rows])
        if list(map(len, present)) != lengths[is_present].tolist():
            raise ValueError("a sample's values are not as many as its tokens")
        flat[np.repeat(is_present, lengths)] = np.concatenate(present)
    return flat
