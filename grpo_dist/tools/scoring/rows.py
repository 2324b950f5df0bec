"""Read completions to score from a JSONL file, or from a table of samples that training or `eval` wrote.
Every error names the file and the row: of a table, the first row of the problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_dist.data.files import json_lines
from grpo_dist.errors import UserError
from grpo_dist.rewards.episodes import Turns

TABLE = ".parquet"  # suffix of a table of samples

# Of a table of samples (grpo_dist/observe/samples.py); its tokens and earlier rewards are not read.
_OF_PROMPTS = ("uid", "source", "problem", "answer")
_OF_SAMPLES = ("sample", "completion", "outcome", "finish_reason", "turns")


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns.

    ``completion`` holds a text or a list of texts; None takes `completion` or `completions`, whichever a row
    has. ``label`` holds verdicts of a person or another grader; ``source`` names the rewards of
    `rewards.by_source`.
    """

    problem: str = "problem"
    completion: str | None = None
    answer: str = "answer"
    label: str | None = None
    source: str = "source"


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """One line of a file, or the rows of one prompt in a table: G completions of one problem.

    Attributes:
        labels: [G] of 1.0 and 0.0; None without a label column.
        source: of the problem; "" without one.
        turns: [G] of the turns of an episode, whose last action is the completion, or () for one that was
            given up before its first turn; () without turns.
        samples: of a table, [G] of a completion's number in the file, from 1, and its own row.
    """

    location: str
    record: Mapping[str, Any]
    problem: str
    answer: str
    completions: tuple[str, ...]
    is_list: bool
    finish_reasons: tuple[str, ...]
    labels: tuple[float, ...] | None
    turns: tuple[Turns, ...] = ()
    source: str = ""
    samples: tuple[tuple[int, CompletionRow], ...] = ()

    @property
    def locations(self) -> list[str]:
        """[G]: where each completion stands."""
        return [row.location for _, row in self.samples] or [self.location] * len(self.completions)

    @property
    def columns(self) -> dict[str, Any]:
        """Columns that a reward can ask for. Problem and answer are texts under these names, as in a run; the
        finish reasons are those of the samples, and no column.
        """
        own = {name: value for name, value in self.record.items() if name != "finish_reason"}
        return own | {"problem": self.problem, "answer": self.answer}


def read_rows(path: Path, columns: Columns) -> list[CompletionRow]:
    """Read all rows. Raises UserError for a missing or empty file, and for an invalid row."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected JSON Lines with `completion` (or `completions`)")
    try:
        rows = list(_rows(path, columns))
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    if not rows:
        raise UserError(f"{path}: no rows; expected JSON Lines with `completion` and `answer`")
    return rows


def _rows(path: Path, columns: Columns) -> Iterator[CompletionRow]:
    if path.suffix != TABLE:
        for location, record in json_lines(path):
            yield _row(dict(record), location, columns)
        return
    try:
        known = pq.read_schema(path).names
        read = [name for name in (*_OF_PROMPTS, *_OF_SAMPLES) if name in known]
        rows = pq.read_table(path, columns=read).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read as a table of samples ({error})") from error
    of_prompts: dict[Any, list[tuple[int, CompletionRow]]] = {}
    for number, row in enumerate(rows, 1):
        turns = [{"action": turn["text"], **turn} for turn in row.pop("turns", None) or ()]
        own = _row(row | ({"turns": turns} if turns else {}), f"{path}:{number}", columns)
        of_prompts.setdefault(row.get("uid") or number, []).append((number, own))
    for samples in of_prompts.values():
        yield _joined(sorted(samples, key=lambda numbered: numbered[1].record.get("sample") or 0))


def _joined(samples: Sequence[tuple[int, CompletionRow]]) -> CompletionRow:
    """Join the rows of a prompt: rewards may compare its samples. Columns of samples are lists."""
    rows = [row for _, row in samples]
    record = dict(rows[0].record)
    for name in record:
        if name in _OF_SAMPLES:
            record[name] = [row.record.get(name) for row in rows]
    labels = [label for row in rows for label in row.labels or ()]
    return replace(
        rows[0],
        record=record,
        completions=tuple(row.completions[0] for row in rows),
        finish_reasons=tuple(row.finish_reasons[0] for row in rows),
        labels=tuple(labels) if len(labels) == len(rows) else None,
        turns=tuple(row.turns[0] if row.turns else () for row in rows) if any(r.turns for r in rows) else (),
        samples=tuple(samples),
    )


def _row(record: dict[str, Any], location: str, columns: Columns) -> CompletionRow:
    turns = _turns(record, location)
    if turns and not {"completion", "completions", columns.completion} & set(record):
        last = [own[-1]["action"] if own else "" for own in turns]
        record = record | {"completion": last if isinstance(record["turns"][0], list) else last[0]}
    name, completions = _completions(record, location, columns.completion)
    if turns and len(turns) != len(completions):
        raise UserError(f"{location}: `turns` has {len(turns)} episodes for {len(completions)} completions")
    count, is_list = len(completions), isinstance(record[name], list)
    problem = record.get(columns.problem)
    if problem is not None and not isinstance(problem, str):
        raise UserError(f"{location}: `{columns.problem}` is a {_kind(problem)}; expected a text")
    reasons = record.get("finish_reason", "stop")
    return CompletionRow(
        location=location,
        record=record,
        problem=problem or "",
        answer=_answer(record, location, columns.answer),
        completions=completions,
        is_list=is_list,
        finish_reasons=tuple(map(str, _each(reasons, count, location, "finish_reason"))),
        labels=_labels(record, location, columns.label, count),
        turns=turns,
        source=str(record.get(columns.source) or ""),
    )


def _completions(record: dict[str, Any], location: str, column: str | None) -> tuple[str, tuple[str, ...]]:
    names = [column] if column else [n for n in ("completion", "completions") if n in record]
    if len(names) != 1 or names[0] not in record:
        wanted = f"`{column}`" if column else "one of `completion` and `completions`"
        raise UserError(
            f"{location}: has {', '.join(map(str, record)) or 'no columns'}; expected {wanted}: a text or a "
            "list of texts. --completion-column names another"
        )
    value = record[names[0]]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{location}: `{names[0]}` holds a {_kind(text)}; expected a text or texts")
    if not texts:
        raise UserError(f"{location}: `{names[0]}` is an empty list; remove the row")
    return names[0], tuple(texts)


def _turns(record: Mapping[str, Any], location: str) -> tuple[Turns, ...]:
    """Return the turns of the row's episodes: objects with `action`, in a list for each completion."""
    given = record.get("turns")
    if given is None:
        return ()
    of_each = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    found = []
    for turns in given if of_each else [given]:
        if not isinstance(turns, list) or not (turns or of_each):
            raise UserError(f"{location}: `turns` is no list of turns; expected objects with `action`")
        for turn in turns:
            if not isinstance(turn, dict) or not isinstance(turn.get("action"), str):
                raise UserError(f"{location}: `turns` has {str(turn)[:60]}; expected objects with `action`")
            reward = turn.get("reward")
            if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
                raise UserError(f"{location}: `turns` has the reward {reward!r}; expected a number or null")
        defaults: dict[str, Any] = {"observation": "", "calls": [], "reward": None}
        found.append([defaults | turn for turn in turns])
    return tuple(found)


def _answer(record: dict[str, Any], location: str, column: str) -> str:
    """Return the answer as text; 8 and 8.0 are "8"."""
    if column not in record:
        raise UserError(
            f"{location}: no column `{column}`; the row has {', '.join(map(str, record))}. --answer-column "
            "names another"
        )
    value = record[column]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{location}: `{column}` is a {_kind(value)}; expected a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{location}: `{column}` is {value}; expected a text or a finite number")
    if not str(value).strip():
        raise UserError(f"{location}: `{column}` is empty, and grading needs an answer: remove the row")
    return str(value)


def _labels(
    record: dict[str, Any], location: str, column: str | None, count: int
) -> tuple[float, ...] | None:
    if column is None:
        return None
    if column not in record:
        raise UserError(
            f"{location}: no column `{column}`, which --label names; the row has {', '.join(record)}"
        )
    labels = _each(record[column], count, location, column)
    for label in labels:
        if label not in (0, 1):  # True and False are
            raise UserError(f"{location}: `{column}` holds {label!r}; expected true, false, 1 or 0")
    return tuple(float(label) for label in labels)


def _each(value: Any, count: int, location: str, column: str) -> list[Any]:
    """Return one value per completion: those of a list, or a single value repeated."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise UserError(
            f"{location}: `{column}` has {len(values)} values for {count} completions; expected one for each"
        )
    return values


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
