"""Episodes in a table of samples: turns, tool calls, and which tokens were given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

COLUMNS = ("turns", "sampled", "further_rows")
NO_CALL = "none"


_OF_TOKENS = ("advantages", "trainer_logprobs", "ref_logprobs")


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One training row of a sample, with what is recorded of each token; None: nothing.

    ``sampled``: bool [C]; None: the policy sampled all of its tokens.
    """

    ids: np.ndarray  # int [C]
    sampled: np.ndarray | None = None
    logprobs: np.ndarray | None = None  # float [C], and so are the others
    advantages: np.ndarray | None = None
    trainer_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None

    @property
    def is_sampled(self) -> np.ndarray:
        return np.ones(len(self.ids), bool) if self.sampled is None else self.sampled


def turns_of(table: pa.Table) -> list[list[dict[str, Any]] | None]:
    """Return the turns of each sample; None for a sample that is no episode."""
    return [turns or None for turns in _values(table, "turns")]


def call_outcomes(turns: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return the outcomes of all tool calls of an episode, e.g. "ok, timeout"; "none" without a call."""
    if turns is None:
        return None
    outcomes = {call["outcome"] for turn in turns for call in turn["calls"] or ()}
    return ", ".join(sorted(outcomes)) or NO_CALL


def call_count(turns: Sequence[Mapping[str, Any]] | None) -> int | None:
    return None if turns is None else sum(len(turn["calls"] or ()) for turn in turns)


def token_rows(table: pa.Table) -> list[list[TokenRow]]:
    """Return the training rows of each sample, the first one first."""
    names = ("completion_ids", "sampled", "logprobs", *_OF_TOKENS)
    first = [_row(*values) for values in zip(*(lists_of(table, name) for name in names), strict=True)]
    further = [[_row(*map(row.get, names)) for row in rows or ()] for rows in _values(table, "further_rows")]
    return [[row, *more] for row, more in zip(first, further, strict=True)]


def given_counts(table: pa.Table) -> list[int]:
    """Return how many tokens of each sample were given, in all its rows."""
    if "sampled" not in table.schema.names:
        return [0] * len(table)
    further = _values(table, "further_rows")
    own = [[mask, *(row["sampled"] for row in more or ())]
           for mask, more in zip(lists_of(table, "sampled"), further, strict=True)]  # fmt: skip
    return [sum(len(m) - int(np.sum(m)) for m in masks if m is not None) for masks in own]


def lengths_of(table: pa.Table) -> list[int | None]:
    """Return the number of tokens of each completion; of an episode, sampled and given, of all its rows."""
    if "completion_ids" not in table.schema.names:
        return [None] * len(table)
    lengths = pc.list_value_length(table["completion_ids"]).to_pylist()
    further = _values(table, "further_rows")
    return [
        None if length is None else length + sum(len(row["completion_ids"]) for row in more or ())
        for length, more in zip(lengths, further, strict=True)
    ]


def given_ranges(rows: Sequence[TokenRow]) -> list[int]:
    """Return begin and end of each stretch of given tokens, counted over all ``rows``, in one list."""
    is_given = ~np.concatenate([row.is_sampled for row in rows])
    return np.flatnonzero(np.diff(is_given, prepend=False, append=False)).tolist()


def last_action(rows: Sequence[TokenRow]) -> np.ndarray:
    """Return the token ids of the last action, whose text the sample's `completion` is."""
    positions = np.flatnonzero(~rows[-1].is_sampled)
    return rows[-1].ids[int(positions[-1]) + 1 :] if len(positions) else rows[-1].ids


def row_starts(rows: Sequence[TokenRow]) -> list[int]:
    """Return the index of the first token of each row, counted over all ``rows``."""
    return [0, *accumulate(len(row.ids) for row in rows[:-1])]


def lists_of(table: pa.Table, name: str) -> list[np.ndarray | None]:
    """Read a list column as one array per row."""
    if name not in table.schema.names:
        return [None] * len(table)
    column = table[name].combine_chunks()
    values, ends = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    is_valid = column.is_valid().to_pylist()
    return [values[a:b] if ok else None for a, b, ok in zip(ends[:-1], ends[1:], is_valid, strict=True)]


def _row(ids: Any, sampled: Any, *values: Any) -> TokenRow:
    return TokenRow(
        np.array([] if ids is None else ids, np.int64),
        None if sampled is None else np.array(sampled, bool),
        *(None if row_values is None else np.array(row_values, np.float64) for row_values in values),
    )


def _values(table: pa.Table, name: str) -> list[Any]:
    return table[name].to_pylist() if name in table.schema.names else [None] * len(table)
