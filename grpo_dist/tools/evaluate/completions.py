"""Reads completions to score from a data file, or from a table of samples written by training or `eval`.

    {"problem": "1+1", "answer": 2, "completion": "so \\\\boxed{2}"}
    {"problem": "1+1", "answer": 2, "completions": ["\\\\boxed{2}", "\\\\boxed{3}"], "finish_reason": "stop"}
    {"answer": 12, "turns": [{"action": "calculator: 3*4", "observation": "12"}, {"action": "\\\\boxed{12}"}]}

Rows with `sample` and equal `uid`, as in a table of samples, are samples of one problem, which rewards may
compare. Every error names the file and the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_dist.config.data import data_ending
from grpo_dist.data.files import file_rows, json_lines
from grpo_dist.errors import UserError, as_user_errors
from grpo_dist.types import Prompt, Rollout, Thought, ToolCall, Turn

TABLE = ".parquet"  # file extension of a table of samples
# Columns of a table of samples (grpo_dist/observe/samples.py); its tokens and earlier rewards are not read.
_PROBLEM = ("uid", "source", "problem", "answer", "thought")
_SAMPLE = ("sample", "completion", "outcome", "finish_reason", "turns")
_CALL: dict[str, Any] = {"name": "", "arguments": "", "result": "", "outcome": "ok", "seconds": 0.0}


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names.

    ``completion`` holds a text or a list of texts; None: `completion` or `completions`, whichever exists.
    ``label`` holds verdicts of a person or another grader.
    """

    completion: str | None = None
    answer: str = "answer"
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Completions:
    """The completions of one problem. ``prompt`` has all columns that rewards can request; `problem` and
    `answer` are texts, as in a run.

    Attributes:
        rows: [G], row of each completion.
        locations: [G], file position of each completion.
        labels: [G], 1.0 or 0.0; () without a label column.
        thought: as it stands in the prompt; None: the row does not have it.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rows: tuple[Mapping[str, Any], ...]
    locations: tuple[str, ...]
    labels: tuple[float, ...] = ()
    thought: Thought | None = None

    @property
    def location(self) -> str:
        return self.locations[0]

    @property
    def source(self) -> str:
        return self.prompt.source

    @property
    def columns(self) -> Mapping[str, Any]:
        return self.prompt.columns


def read_completions(path: Path, columns: Columns) -> list[Completions]:
    """Read all completions. Raises UserError for a missing or empty file, and for an invalid row."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected JSON Lines with `completion` (or `completions`)")
    names = dict.fromkeys((*_PROBLEM, *_SAMPLE, *filter(None, astuple(columns))))
    columns_read = list(names) if _is_samples(path) else ()
    read = file_rows(path, columns=columns_read) if data_ending(str(path)) else json_lines(path)
    problems: dict[Any, list[tuple[str, Mapping[str, Any]]]] = {}
    with as_user_errors():
        for number, (location, row) in enumerate(read):
            together = row.get("uid") is not None and row.get("sample") is not None
            for sample in _samples(row, location, columns):
                problems.setdefault(row["uid"] if together else number, []).append((location, sample))
        for samples in problems.values():
            samples.sort(key=lambda located: located[1].get("sample") or 0)
        completions = [_completions(samples, columns) for samples in problems.values()]
    if not completions:
        raise UserError(f"{path}: no rows; expected JSON Lines with `completion` and `answer`")
    return completions


def _is_samples(path: Path) -> bool:
    if path.suffix != TABLE:
        return False
    import pyarrow as pa  # heavy: only for tables
    import pyarrow.parquet as pq

    try:
        return {"uid", "sample", "completion"} <= set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read as a table of samples ({error})") from error


def _samples(record: Mapping[str, Any], location: str, columns: Columns) -> list[dict[str, Any]]:
    """Return a row for each completion of ``record``, with only that completion's values."""
    row, turns = dict(record), record.get("turns")
    of_each = isinstance(turns, list) and bool(turns) and isinstance(turns[0], list)
    names = [columns.completion] if columns.completion else ["completion", "completions"]
    names = [name for name in names if name in row]
    if turns and not names:
        names, row["completion"] = ["completion"], [None] * len(turns) if of_each else None
    if len(names) != 1:
        wanted = f"`{columns.completion}`" if columns.completion else "one of `completion` and `completions`"
        raise ValueError(
            f"{location}: has {', '.join(map(str, row)) or 'no columns'}; expected {wanted}: a text or a "
            "list of texts. --completion-column names another"
        )
    value = row.pop(names[0])
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise ValueError(f"{location}: `{names[0]}` is an empty list; remove the row")
    if turns is not None:
        row["turns"] = turns if of_each else [turns]
    of_each_text = ("turns", "finish_reason", *([columns.label] if columns.label else []))
    lists = [name for name in of_each_text if isinstance(row.get(name), list)]
    for name in lists:
        if len(row[name]) != len(texts):
            raise ValueError(
                f"{location}: `{name}` has {len(row[name])} values for {len(texts)} completions; expected "
                "one for each"
            )
    samples = []
    for i, text in enumerate(texts):
        sample = row | {name: row[name][i] for name in lists}
        if "turns" in sample:
            sample["turns"] = [
                _checked_turn(turn, location) for turn in _turn_list(sample["turns"], location)
            ]
            if text is None and sample["turns"]:
                text = sample["turns"][-1]["action"]
        if not isinstance(text, str):
            raise ValueError(f"{location}: `{names[0]}` holds a {_kind(text)}; expected a text or texts")
        samples.append(sample | {"completion": text})
    return samples


def _turn_list(turns: Any, location: str) -> list[Any]:
    if not isinstance(turns, list):
        raise ValueError(f"{location}: `turns` is no list of turns; expected objects with `action`")
    return turns


def _checked_turn(turn: Any, location: str) -> dict[str, Any]:
    """Return a turn in the form for rewards; in sample tables the action is in `text`."""
    action = turn.get("action", turn.get("text")) if isinstance(turn, dict) else None
    if not isinstance(action, str):
        raise ValueError(f"{location}: `turns` has {str(turn)[:60]}; expected objects with `action`")
    reward, calls = turn.get("reward"), turn.get("calls") or []
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise ValueError(f"{location}: `turns` has the reward {reward!r}; expected a number or null")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{location}: `turns` has the calls {str(calls)[:60]}; expected a list of objects")
    calls = [{name: call.get(name, default) for name, default in _CALL.items()} for call in calls]
    thought = turn.get("thought")
    return {
        "action": action,
        "observation": str(turn.get("observation") or ""),
        "calls": calls,
        "reward": reward,
        "thought": thought if thought in ("", "opens", "closes") else None,
    }


def _completions(samples: Sequence[tuple[str, Mapping[str, Any]]], columns: Columns) -> Completions:
    """Join the samples of one problem."""
    location, first = samples[0]
    problem = first.get("problem")
    if problem is not None and not isinstance(problem, str):
        raise ValueError(f"{location}: `problem` is a {_kind(problem)}; expected a text")
    answer = _answer(first, location, columns.answer)
    shared = {name: value for name, value in first.items() if name not in _SAMPLE}
    prompt = Prompt(
        uid=str(first.get("uid") or location),
        token_ids=np.empty(0, np.int32),
        answer=answer,
        source=str(first.get("source") or ""),
        text=problem or "",
        columns=shared | {"problem": problem or "", "answer": answer},
    )
    return Completions(
        prompt,
        rollouts=tuple(_rollout(prompt.uid, i, row) for i, (_, row) in enumerate(samples)),
        rows=tuple(row for _, row in samples),
        locations=tuple(where for where, _ in samples),
        labels=tuple(_label(row, where, columns.label) for where, row in samples if columns.label),
        thought=_thought(first.get("thought")),
    )


def _thought(value: Any) -> Thought | None:
    """Return the thought of a prompt as tables of samples have it; None for another column of this name."""
    is_thought = isinstance(value, dict) and value.keys() == set(Thought.__slots__)
    return Thought(**value) if is_thought else None


def _rollout(uid: str, sample: int, row: Mapping[str, Any]) -> Rollout:
    turns = tuple(
        Turn(
            0,
            0,
            turn["action"],
            turn["observation"],
            tuple(ToolCall(**c) for c in turn["calls"]),
            turn["reward"],
            turn["thought"],
        )
        for turn in row.get("turns", ())
    )
    return Rollout.without_tokens(
        uid,
        sample,
        finish_reason=str(row.get("finish_reason", "stop")),
        text=row["completion"],
        turns=turns,
    )


def _answer(row: Mapping[str, Any], location: str, column: str) -> str:
    """Return the answer as text; 8 and 8.0 are "8"."""
    if column not in row:
        raise ValueError(
            f"{location}: no column `{column}`; the row has {', '.join(map(str, row))}. --answer-column "
            "names another"
        )
    value = row[column]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{location}: `{column}` is a {_kind(value)}; expected a text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{location}: `{column}` is {value}; expected a text or a finite number")
    if not str(value).strip():
        raise ValueError(f"{location}: `{column}` is empty, and grading needs an answer: remove the row")
    return str(value)


def _label(row: Mapping[str, Any], location: str, column: str) -> float:
    if column not in row:
        raise ValueError(
            f"{location}: no column `{column}`, which --label names; the row has {', '.join(row)}"
        )
    if row[column] not in (0, 1):  # True == 1, False == 0
        raise ValueError(f"{location}: `{column}` holds {row[column]!r}; expected true, false, 1 or 0")
    return float(row[column])


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
