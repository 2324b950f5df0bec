"""Tables of samples for the page: one part of a file at a time, as columns.

A part has whole groups. The page holds the ``rows`` of all parts for the rollout table, and loads ``texts``
and token values when a group is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_dist.observe.completions import said_besides
from grpo_dist.rewards.match import final_answer
from grpo_dist.rewards.text import boxes
from grpo_dist.rewards.thought import final_text
from grpo_dist.tools.report import episodes

if TYPE_CHECKING:
    from grpo_dist.rewards.pool import GraderPool

_ROWS = 2000  # rows per part, plus the rest of its last group
_LONGEST = 32_000  # maximum characters shown of a completion
_PREVIEW = 90  # characters in the table, of a problem, an answer, and the end of a completion
_PROMPT = 8000  # maximum tokens shown of a prompt
_PART = "reward/"
_GRADED = 200_000  # characters at a completion's end searched for boxes, as in the grader
_SEARCHED = 2000  # maximum completions without a box to parse like the grader; milliseconds each
_LISTS = dict.fromkeys(("completion_ids", "prompt_ids"), pa.list_(pa.int32()))
_LISTS |= dict.fromkeys(
    ("advantages", "logprobs", "trainer_logprobs", "ref_logprobs"), pa.list_(pa.float32())
)
_TYPES = {"sampled": pa.list_(pa.bool_()), "reward": pa.float32(), "advantage": pa.float32(), **_LISTS}
COLUMNS = (
    "uid", "source", "problem", "answer", "sample", "completion", "reward", "outcome", "finish_reason",
    "completion_ids", "advantage", "prompt_ids", "failures", *episodes.COLUMNS,
)  # fmt: skip


def cut(path: Path) -> tuple[list[range], bool]:
    """Cut a file's rows into parts; also return whether it has per-token training values. Raises pyarrow's
    errors for a file that is not a table of samples.
    """
    with pq.ParquetFile(path) as file:  # `read_table` would import pandas
        starts, names = group_starts(file.read(["uid", "sample"])), file.schema_arrow.names
        count = file.metadata.num_rows
    cuts = [0]
    for start in starts:
        if start - cuts[-1] >= _ROWS:
            cuts.append(start)
    parts = [range(begin, end) for begin, end in pairwise([*cuts, count])]
    return [part for part in parts if part], "trainer_logprobs" in names


def group_starts(table: pa.Table) -> list[int]:
    """Return the first row of each group, where the prompt changes or the sample number does not increase."""
    uid = episodes.to_numpy(table["uid"].combine_chunks().dictionary_encode().indices)
    sample = episodes.to_numpy(table["sample"].combine_chunks())
    new = np.ones(len(uid), dtype=bool)
    new[1:] = (uid[1:] != uid[:-1]) | (sample[1:] <= sample[:-1])
    return np.flatnonzero(new).tolist()


def read_rows(path: Path, part: range, columns: Sequence[str] = ()) -> pa.Table:
    """Read the rows. Missing ``columns`` are null; () reads the columns of a report."""
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        names_to_read = columns or [*COLUMNS, *(name for name in names if name.startswith(_PART))]
        present = [name for name in names_to_read if name in names]
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = list(accumulate(sizes))
        row_groups = [i for i, end in enumerate(ends) if end > part.start and end - sizes[i] < part.stop]
        row = ends[row_groups[0]] - sizes[row_groups[0]]
        batches: list[pa.RecordBatch] = []
        skipped = 0  # rows of the first batch: Parquet has no index of the rows in a row group
        for batch in file.iter_batches(500, row_groups=row_groups, columns=present):
            if row >= part.stop:
                break
            if row + len(batch) > part.start:
                skipped = skipped if batches else part.start - row
                batches.append(batch)
            row += len(batch)
        table = pa.Table.from_batches(batches).slice(skipped, len(part))
    for name in dict.fromkeys(names_to_read):
        if name not in names:
            table = table.append_column(name, pa.nulls(len(table), _TYPES.get(name, pa.string())))
    return table


def rows(table: pa.Table, answers: AnswerReader) -> dict[str, Any]:
    """Return columns with one value per sample; texts are {"values": [...], "index": [...]}."""
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
        "advantage": numbers_of(table, "advantage"),
        "uid": _shared(texts_of(table, "uid")),
        "source": _shared(texts_of(table, "source")),
        "outcome": _shared(outcomes),
        "finish": _shared(texts_of(table, "finish_reason")),
        "problem": _shared([_preview(text) for text in texts_of(table, "problem")]),
        "expected": _shared([_preview(text) for text in texts_of(table, "answer")]),
        "found": _shared([_preview(text) for text in boxed]),
        "called": _shared([episodes.call_outcomes(each) for each in turns]),
        "ending": _shared([_ending(text) for text in texts_of(table, "completion")]),
        "failure": _shared(["\n".join(reasons or ()) for reasons in table["failures"].to_pylist()]),
    }
    parts = [name for name in table.schema.names if name.startswith(_PART)]
    return columns | {"parts": {name.removeprefix(_PART): numbers_of(table, name) for name in parts}}


def texts(table: pa.Table, token_texts: Callable[[np.ndarray], list[str]] | None = None) -> dict[str, Any]:
    """Return {"problem": [...], "answer": [...], "prompt": [...]} per group, and {"completion": [...],
    "turns": [...]} per sample; turns are null for samples that are not episodes.

    "prompt" has the text of each prompt token, by ``token_texts``, and the number of tokens if some are left
    out; null without a tokenizer.
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
    """Read a text column, replacing invalid UTF-8; None for missing values."""
    raw = table[name].cast(pa.binary()).to_pylist()
    return [None if value is None else value.decode("utf-8", "replace") for value in raw]


def numbers_of(table: pa.Table, name: str) -> list[float | None]:
    return [_rounded(value) for value in table[name].to_pylist()]


def _shown_prompt(ids: np.ndarray, token_texts: Callable[[np.ndarray], list[str]]) -> dict[str, Any]:
    half = _PROMPT // 2
    pieces = [ids] if len(ids) <= _PROMPT else [ids[:half], ids[-half:]]
    return {"tokens": [token_texts(part) for part in pieces], "length": len(ids)}


def _shown_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "arguments": _shortened(call["arguments"]), "result": _shortened(call["result"])}
        for call in turn["calls"] or ()
    ]
    message = said_besides(turn["observation"], [call["result"] for call in turn["calls"] or ()])
    texts = {"text": _shortened(turn["text"]), "observation": _shortened(message)}
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


class AnswerReader:
    """Finds answers in completions. Thread-safe. A context manager.

    Completions without a box are parsed in a killable process, started on first use.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: GraderPool | None = None
        self._left = _SEARCHED
        self.not_searched = 0

    def read(self, completions: Sequence[str], outcomes: Sequence[str]) -> list[str | None]:
        """Return the answer of each completion; None: no answer, or not searched.

        The answer is the last box, after ``</think>`` if anything follows it; else the math grader's answer,
        or, if no math grader ran, the final answer for plain comparison.
        """
        answers: list[str | None] = [None] * len(completions)
        unboxed = []
        for i, (completion, outcome) in enumerate(zip(completions, outcomes, strict=True)):
            if outcome == "no_answer":  # a box can only be inside an unclosed thought
                continue
            if boxed := boxes(final_text(completion[-_GRADED:])):
                answers[i] = boxed[-1]
            elif not outcome:
                answers[i] = final_answer(completion) or None
            elif outcome in ("correct", "wrong"):
                unboxed.append(i)
        with self._lock:
            searched = unboxed[: self._left]
            self._left -= len(searched)
            self.not_searched += len(unboxed) - len(searched)
            for i, answer in zip(searched, self._read([completions[i] for i in searched]), strict=True):
                answers[i] = answer
        return answers

    def __enter__(self) -> AnswerReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def _read(self, completions: list[str]) -> list[str | None]:
        if not completions:
            return []
        if self._pool is None:
            from grpo_dist.rewards.pool import GraderPool  # slow to import

            self._pool = GraderPool(1)
        return self._pool.extract(completions)
