"""From a data source to rows of problem and answer. Every refusal names the file and the row."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.config import DataSource

_FILE_TYPES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class Row:
    """One problem as found; ``location`` is where, for messages: ``gsm8k.jsonl:17``."""

    problem: str
    answer: str
    source: str
    location: str
    columns: Mapping[str, Any]


def read(source: DataSource) -> list[Row]:
    """All rows of ``source``, at most ``max_rows``.

    Raises ValueError for a missing file or split, a malformed row, a missing column, a row without problem or
    answer, and an empty data set; the message names the file and the row.
    """
    label = source_name(source)
    rows: list[Row] = []
    for location, record in _records(source):
        if source.max_rows is not None and len(rows) >= source.max_rows:
            break
        rows.append(_row(record, location, source, label))
    if not rows:
        raise ValueError(
            f"{source.path}: no rows; expected at least one with `{source.problem_column}` and "
            f"`{source.answer_column}`"
        )
    return rows


def source_name(source: DataSource) -> str:
    """The label of a source in metrics and samples."""
    if source.name:
        return source.name
    return source.path.removeprefix("demo:") if source.path.startswith("demo:") else Path(source.path).stem


def _records(source: DataSource) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if source.path.startswith("demo:"):
        from grpo_dist.demo.problems import problems

        name = source.path.removeprefix("demo:")
        yield from ((f"{name}/{source.split}:{i}", r) for i, r in enumerate(problems(name, source.split), 1))
        return
    path = Path(source.path).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        yield from _json_lines(path)
    else:
        yield from ((f"{path.name}:{i}", record) for i, record in enumerate(_dataset(path, source), 1))


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Line by line, because only so a bad line can be named."""
    with path.open(encoding="utf-8", errors="strict") as file:
        number = 0
        while True:
            number += 1
            location = f"{path}:{number}"
            try:
                line = file.readline()
                if not line:
                    return
                record = json.loads(line) if line.strip() else None
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{location}: not UTF-8 ({error.reason}); expected JSON Lines in UTF-8"
                ) from error
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{location}: not valid JSON ({error.msg} at column {error.colno}); expected one object "
                    f"per line"
                ) from error
            if record is None:
                continue
            if not isinstance(record, dict):
                raise ValueError(f"{location}: a JSON {type(record).__name__}; expected one object per line")
            yield location, record


def _dataset(path: Path, source: DataSource) -> Iterable[Mapping[str, Any]]:
    """Parquet and JSON files, saved data sets and hub ids, through the `datasets` library."""
    import datasets

    datasets.disable_progress_bars()
    if path.is_file():
        kind = _FILE_TYPES.get(path.suffix)
        if kind is None:
            raise ValueError(f"{path}: unknown file type {path.suffix!r}; expected .jsonl, .json or .parquet")
        # Streaming reads the file itself, every time: nothing cached can go stale, nothing is written beside
        # it.
        return _guard(
            lambda: datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True), source
        )
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return _split(_guard(lambda: datasets.load_from_disk(str(path)), source), source)
        return _guard(lambda: datasets.load_dataset(str(path), split=source.split, streaming=True), source)
    if (
        path.is_absolute()
        or source.path.startswith((".", "~"))
        or source.path.count("/") > 1
        or path.suffix in _FILE_TYPES
    ):
        raise ValueError(
            f"{source.path}: no such file or directory; expected a .jsonl or .parquet file, a data "
            "set directory, "
            "or a hub id such as openai/gsm8k"
        )
    return _guard(lambda: datasets.load_dataset(source.path, source.subset, split=source.split), source)


def _split(loaded: Any, source: DataSource) -> Any:
    if not isinstance(loaded, Mapping):
        return loaded
    if source.split not in loaded:
        raise ValueError(f"{source.path}: no split `{source.split}`; it has {', '.join(loaded)}")
    return loaded[source.split]


def _guard(load: Any, source: DataSource) -> Any:
    try:
        return load()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{source.path}: the data set cannot be loaded ({reason}); check the path or hub id, `split` = "
            f"{source.split}, `subset` = {source.subset} and the network"
        ) from error


def _row(record: Mapping[str, Any], location: str, source: DataSource, label: str) -> Row:
    problem = _text(_column(record, source.problem_column, location))
    answer = _answer(_column(record, source.answer_column, location), location, source)
    if not problem.strip():
        raise ValueError(f"{location}: `{source.problem_column}` is empty; expected the text of a problem")
    columns = {name: _column(record, name, location) for name in source.columns}
    return Row(problem, answer, label, location, columns)


def _column(record: Mapping[str, Any], name: str, location: str) -> Any:
    if name not in record:
        near = difflib.get_close_matches(name, record, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else "."
        has = ", ".join(map(str, record))
        raise ValueError(
            f"{location}: no column `{name}`{hint} The row has: {has}. Set `problem_column` and "
            "`answer_column` of the data source"
        )
    return record[name]


def _answer(value: Any, location: str, source: DataSource) -> str:
    answer = _text(value).strip()
    if source.answer_pattern is not None:
        found = re.search(source.answer_pattern, answer)
        if found is None:
            raise ValueError(
                f"{location}: `{source.answer_column}` does not match answer_pattern "
                f"{source.answer_pattern!r}: "
                f"...{answer[-60:]!r}; mend the row or the pattern"
            )
        answer = found.group(1).strip()
    if not answer:
        raise ValueError(
            f"{location}: `{source.answer_column}` is empty; a problem without an answer cannot be "
            "graded: remove the row"
        )
    return answer


def _text(value: Any) -> str:
    """8 and 8.0 are "8"; None is empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
