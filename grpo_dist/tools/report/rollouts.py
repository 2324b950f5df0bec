"""Tables of samples for the page: one part of a file at a time, as columns.

A part has whole groups. The page holds the ``rows`` of all parts, for the table of rollouts. It loads
``texts`` and token values when a group is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_dist.observe.completions import said_besides
from grpo_dist.tools.report import episodes
from grpo_dist.tools.report.answers import AnswerReader

_ROWS = 2000  # in a part, plus the rest of its last group
_LONGEST = 32_000  # characters of a completion to show
_PREVIEW = 90  # characters of a problem, of an answer, and from the end of a completion, in the table
_PROMPT = 8000  # tokens of a prompt to show
_PART = "reward/"
COLUMNS = ("uid", "source", "problem", "answer", "sample", "completion", "reward", "outcome", "finish_reason")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive rows of a file.

    Attributes:
        begin: the first row, from 0.
        end: behind the last one.
    """

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A file in parts. ``recorded``: it has the training values of each token."""

    stretches: tuple[Stretch, ...]
    recorded: bool


def cut(path: Path) -> Cut:
    """Cut a file into parts. Raises the errors of pyarrow for a file that is not a table of samples."""
    with pq.ParquetFile(path) as file:  # `read_table` would import pandas
        starts, names = group_starts(file.read(["uid", "sample"])), file.schema_arrow.names
        ends = [file.metadata.num_rows]
    cuts = [0]
    for start in starts:
        if start - cuts[-1] >= _ROWS:
            cuts.append(start)
    stretches = tuple(Stretch(a, b) for a, b in zip(cuts, cuts[1:] + ends, strict=True) if b > a)
    return Cut(stretches, "trainer_logprobs" in names)


def group_starts(table: pa.Table) -> list[int]:
    """Return the first row of each group: the prompt changes, or the sample number does not increase."""
    uid = episodes.to_numpy(table["uid"].combine_chunks().dictionary_encode().indices)
    sample = episodes.to_numpy(table["sample"].combine_chunks())
    new = np.ones(len(uid), dtype=bool)
    new[1:] = (uid[1:] != uid[:-1]) | (sample[1:] <= sample[:-1])
    return np.flatnonzero(new).tolist()


def read_stretch(path: Path, stretch: Stretch, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the rows. ``columns`` that the file lacks are skipped; None reads those that a report shows."""
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        wanted = columns or [
            *COLUMNS,
            "completion_ids",
            "advantage",
            "advantages",
            "prompt_ids",
            "failures",
            *episodes.COLUMNS,
            *(n for n in names if n.startswith(_PART)),
        ]
        present = [name for name in wanted if name in names]
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = list(accumulate(sizes))
        parts = [i for i, end in enumerate(ends) if end > stretch.begin and end - sizes[i] < stretch.end]
        row = ends[parts[0]] - sizes[parts[0]]
        batches: list[pa.RecordBatch] = []
        skipped = 0  # rows of the first batch: Parquet has no index of the rows in a row group
        for batch in file.iter_batches(500, row_groups=parts, columns=present):
            if row >= stretch.end:
                break
            if row + len(batch) > stretch.begin:
                skipped = skipped if batches else stretch.begin - row
                batches.append(batch)
            row += len(batch)
        table = pa.Table.from_batches(batches)
    return table.slice(skipped, stretch.end - stretch.begin)


def rows(table: pa.Table, answers: AnswerReader) -> dict[str, Any]:
    """Return columns with a value per sample; texts are {"values": [...], "index": [...]}."""
    starts = group_starts(table)
    group = np.zeros(len(table), dtype=int)
    group[starts] = 1
    outcomes = [value or "" for value in texts_of(table, "outcome")]
    boxed = answers.read([text or "" for text in texts_of(table, "completion")], outcomes)
    turns = episodes.turns_of(table)
    columns = {
        "group": (np.cumsum(group) - 1).tolist(),
        "sample": table["sample"].to_pylist(),
        "reward": numbers_of(table, "reward"),
        "length": episodes.lengths_of(table),
        "given": episodes.given_counts(table),
        "turns": [None if each is None else len(each) for each in turns],
        "calls": [episodes.call_count(each) for each in turns],
        "advantage": _advantages(table),
        "uid": _shared(texts_of(table, "uid")),
        "source": _shared(texts_of(table, "source")),
        "outcome": _shared(outcomes),
        "finish": _shared(texts_of(table, "finish_reason")),
        "problem": _shared([_preview(text) for text in texts_of(table, "problem")]),
        "expected": _shared([_preview(text) for text in texts_of(table, "answer")]),
        "found": _shared([_preview(text) for text in boxed]),
        "called": _shared([episodes.call_outcomes(each) for each in turns]),
        "ending": _shared([_ending(text) for text in texts_of(table, "completion")]),
        "failure": _shared(["\n".join(reasons) for reasons in _failures(table)]),
    }
    parts = [name for name in table.schema.names if name.startswith(_PART)]
    return columns | {"parts": {name.removeprefix(_PART): numbers_of(table, name) for name in parts}}


def texts(table: pa.Table, token_texts: Callable[[np.ndarray], list[str]] | None = None) -> dict[str, Any]:
    """Return {"problem": [...], "answer": [...], "prompt": [...]} per group, and {"completion": [...],
    "turns": [...]} per sample; turns are null for a sample that is no episode.

    "prompt" has the text of each token that the model read, by ``token_texts``, and their number where some
    are left out; null without a tokenizer, and of an earlier table, which has no tokens of prompts.
    """
    starts = np.array(group_starts(table), np.int64)  # `pa.array` would import pandas
    first = table.take(pa.Array.from_buffers(pa.int64(), len(starts), [None, pa.py_buffer(starts)]))
    prompts = [
        None if ids is None or token_texts is None else _shown_prompt(ids, token_texts)
        for ids in episodes.lists_of(first, "prompt_ids")
    ]
    return {
        "prompt": prompts,
        "problem": [_shortened(text) for text in texts_of(first, "problem")],
        "answer": [_shortened(text) for text in texts_of(first, "answer")],
        "completion": [_shortened(text) for text in texts_of(table, "completion")],
        "turns": [each and [_shown_turn(turn) for turn in each] for each in episodes.turns_of(table)],
    }


def texts_of(table: pa.Table, name: str) -> list[str | None]:
    """Read a text column, replacing invalid UTF-8; None for missing values, or a missing column."""
    if name not in table.schema.names:
        return [None] * len(table)
    raw = table[name].cast(pa.binary()).to_pylist()
    return [None if value is None else value.decode("utf-8", "replace") for value in raw]


def numbers_of(table: pa.Table, name: str) -> list[float | None]:
    if name not in table.schema.names:
        return [None] * len(table)
    return [_rounded(value) for value in table[name].to_pylist()]


def _advantages(table: pa.Table) -> list[float | None]:
    """Return the mean advantage of each sample's tokens, which most estimators make equal.

    Older tables have only the values per token.
    """
    if "advantage" in table.schema.names:
        return [_rounded(value) for value in table["advantage"].to_pylist()]
    advantages = episodes.lists_of(table, "advantages")
    return [None if v is None or not len(v) else _rounded(float(np.mean(v))) for v in advantages]


def _shown_prompt(ids: np.ndarray, token_texts: Callable[[np.ndarray], list[str]]) -> dict[str, Any]:
    half = _PROMPT // 2
    kept = [ids] if len(ids) <= _PROMPT else [ids[:half], ids[-half:]]
    return {"tokens": [token_texts(part) for part in kept], "length": len(ids)}


def _failures(table: pa.Table) -> list[list[str]]:
    if "failures" not in table.schema.names:
        return [[]] * len(table)
    return [reasons or [] for reasons in table["failures"].to_pylist()]


def _shown_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "arguments": _shortened(call["arguments"]), "result": _shortened(call["result"])}
        for call in turn["calls"] or ()
    ]
    said = said_besides(turn["observation"], [call["result"] for call in turn["calls"] or ()])
    texts = {"text": _shortened(turn["text"]), "observation": _shortened(said)}
    return {**turn, **texts, "calls": calls, "reward": _rounded(turn["reward"])}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _shared(values: Sequence[Hashable]) -> dict[str, Any]:
    places = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return {"values": list(places), "index": [places[value] for value in values]}


def _preview(text: str | None) -> str | None:
    return None if text is None else text if len(text) <= _PREVIEW else text[: _PREVIEW - 1] + "…"


def _ending(text: str | None) -> str | None:
    return None if text is None else text if len(text) <= _PREVIEW else f"…{text[1 - _PREVIEW :]}"


def _shortened(text: str | None) -> str:
    """Shorten a long text to its beginning and end."""
    text = text or ""
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[… {len(text) - _LONGEST:,} characters left out …]\n{text[-half:]}"
