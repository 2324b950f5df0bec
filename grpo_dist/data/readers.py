"""Reads data sources into rows of problem and answer. Every error names the file and the row."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_dist.config import DataSourceConfig
from grpo_dist.data.json_rows import json_lines, json_rows
from grpo_dist.data.made_problems import problems
from grpo_dist.environments.registry import load_environment
from grpo_dist.errors import expanded
from grpo_dist.runtime.patterns import PatternSearch, PatternTimeout

# Yields location and record of every row of a source without a `path`, or with that of a user's function.
OwnProblems = Callable[[DataSourceConfig], Iterator[tuple[str, Mapping[str, Any]]]]

PATTERN_S = 10.0  # deadline of answer_pattern on one row
_JSON = (".jsonl", ".json")  # read here: `datasets` gives mixed columns other types, and texts like dates
_PARQUET = ".parquet"


@dataclass(frozen=True, slots=True)
class DataRow:
    """One problem of a data source; ``location`` is for messages: ``gsm8k.jsonl:17``."""

    problem: str
    answer: str
    source: str
    location: str
    columns: Mapping[str, Any]


def read(source: DataSourceConfig, own: OwnProblems | None = None) -> list[DataRow]:
    """Read the rows of ``source``, at most ``max_rows``.

    Args:
        own: reads a source without a `path`, whose environment brings the problems.

    Raises ValueError for a missing file or split, a malformed row, a missing column, a row without problem or
    answer, or an empty data set. The message names the file and the row.
    """
    label = source_name(source)
    rows: list[DataRow] = []
    with PatternSearch(source.answer_pattern or "()", timeout_s=PATTERN_S) as pattern:
        for location, record in _records(source, own):
            if source.max_rows is not None and len(rows) >= source.max_rows:
                break
            rows.append(_row(record, location, source, label, pattern))
    if not rows:
        raise ValueError(
            f"{source.path or label}: no rows; expected at least one with `{source.problem_column}` and "
            f"`{source.answer_column}`"
        )
    return rows


class MissingColumn(ValueError):
    """A row lacks the column that ``setting`` of its data source names."""

    def __init__(self, message: str, setting: str) -> None:
        super().__init__(message, setting)
        self.message, self.setting = message, setting

    def __str__(self) -> str:
        return self.message


def read_all(
    sources: Sequence[DataSourceConfig], key: str = "", own: OwnProblems | None = None
) -> list[tuple[DataSourceConfig, list[DataRow]]]:
    """Read every source. ``key`` is the configuration key of the sources, for messages; ``own`` as in
    `read`.
    """
    found = []
    for number, source in enumerate(sources):
        try:
            found.append((source, read(source, own)))
        except MissingColumn as error:
            if not key:
                raise
            raise ValueError(f"{error}, here `{key}.{number}.{error.setting}`") from error
    return found


def count_rows(source: DataSourceConfig) -> int:
    """Return the rows of ``source``, at most ``max_rows``, whatever their columns. Raises ValueError for what
    cannot be read, like `read`.
    """
    return sum(1 for _ in islice(_records(source), source.max_rows))


def first_record(source: DataSourceConfig) -> Mapping[str, Any]:
    """Return the raw first row; {} without rows. Raises ValueError like `read`."""
    return next((record for _, record in _records(source)), {})


def common_columns(source: DataSourceConfig, own: OwnProblems | None = None) -> list[str]:
    """Return the columns that all rows have; [] without rows. Raises ValueError like `read`."""
    records = (record for _, record in islice(_records(source, own), source.max_rows))
    names = dict.fromkeys(next(records, {}))
    for record in records:
        names = {name: None for name in names if name in record}
    return list(names)


def brings_columns(source: DataSourceConfig) -> bool:
    """Return True where rows keep all their columns, whatever `columns` names: those of environments and of
    reasoning-gym, which score by them.
    """
    return source.path is None or source.is_generated_by_reasoning_gym


def source_name(source: DataSourceConfig) -> str:
    """Return the name of a source in metrics and samples."""
    return source.label


def _records(
    source: DataSourceConfig, own: OwnProblems | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if source.path is None or source.is_own:
        if own is None:
            raise ValueError(
                f"a data source with path = {source.path}: nothing here runs environments and your own code; "
                "name a file"
            )
        yield from own(source)
        return
    if source.is_generated_by_reasoning_gym:
        # The package is optional; the adapter that imports it is the environment's.
        adapter = load_environment(source.path)
        rows = adapter.problems(source.split, source.max_rows, **source.kwargs)
        yield from ((f"{source.path}/{source.split}:{i}", row) for i, row in enumerate(rows, 1))
        return
    if source.path.startswith("demo:"):
        name = source.path.removeprefix("demo:")
        yield from ((f"{name}/{source.split}:{i}", r) for i, r in enumerate(problems(name, source.split), 1))
        return
    path = expanded(source.path)
    if path.suffix in _JSON and os.path.isfile(path):  # False for a name that is too long
        _check_no_subset(source, "a single file")
        yield from json_rows(path) if path.suffix == ".json" else json_lines(path)
    else:
        yield from ((f"{path.name}:{i}", record) for i, record in _counted(_dataset(path, source), source))


def _dataset(path: Path, source: DataSourceConfig) -> Iterable[Mapping[str, Any]]:
    """Load Parquet files, saved data sets, directories and hub ids through the `datasets` library."""
    import datasets  # heavy: JSON and generated problems do not need it

    assert source.path is not None  # `_records` has seen to it
    datasets.disable_progress_bars()
    if os.path.isfile(path):
        if path.suffix != _PARQUET:
            raise ValueError(f"{path}: unknown file type {path.suffix!r}; expected .jsonl, .json or .parquet")
        _check_no_subset(source, "a single file")
        if _guard(lambda: _parquet_rows(path), source) == 0:  # which `datasets` cannot read
            return []
        # Streaming reads the file itself: no cache can go stale, and nothing is written.
        return _guard(
            lambda: datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True),
            source,
        )
    if os.path.isdir(path):
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            _check_no_subset(source, "a saved data set")
            return _split(_guard(lambda: datasets.load_from_disk(str(path)), source), source)
        return _guard(
            lambda: datasets.load_dataset(str(path), source.subset, split=source.split, streaming=True),
            source,
        )
    if (
        path.is_absolute()
        or source.path.startswith((".", "~"))
        or source.path.count("/") > 1
        or path.suffix in (*_JSON, _PARQUET)
    ):
        raise ValueError(
            f"{source.path}: no such file or directory; expected a .jsonl or .parquet file, a data set "
            "directory, or a hub id such as openai/gsm8k"
        )
    return _guard(lambda: datasets.load_dataset(source.path, source.subset, split=source.split), source)


def _parquet_rows(path: Path) -> int:
    """Return how many rows the Parquet file ``path`` has."""
    from pyarrow.parquet import read_metadata  # heavy: JSON and generated problems do not need it

    return int(read_metadata(path).num_rows)


def _check_no_subset(source: DataSourceConfig, kind: str) -> None:
    if source.subset is not None:
        raise ValueError(
            f"{source.path}: `subset` = {source.subset}, but {kind} has no configurations; remove `subset`, "
            "or name the directory or hub id that has them"
        )


def _counted(
    records: Iterable[Mapping[str, Any]], source: DataSourceConfig
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Number rows from 1. Streamed rows are only read here, so a damaged file fails here."""
    iterator, number = iter(records), 0
    while (record := _guard(lambda: next(iterator, None), source)) is not None:
        number += 1
        yield number, record


def _split(loaded: Any, source: DataSourceConfig) -> Any:
    if not isinstance(loaded, Mapping):
        return loaded
    if source.split not in loaded:
        raise ValueError(f"{source.path}: no split `{source.split}`; it has {', '.join(loaded)}")
    return loaded[source.split]


def _guard(load: Callable[[], Any], source: DataSourceConfig) -> Any:
    try:
        return load()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{source.path}: the data set cannot be loaded ({reason}); check the path or hub id, `split` = "
            f"{source.split}, `subset` = {source.subset} and the network"
        ) from error


def _row(
    record: Mapping[str, Any], location: str, source: DataSourceConfig, label: str, pattern: PatternSearch
) -> DataRow:
    if brings_columns(source):  # it may also score without an answer
        return _own_row(record, location, source, label)
    problem = _text(record, source.problem_column, location, "problem_column")
    answer = _text(record, source.answer_column, location, "answer_column").strip()
    answer = _answer(answer, location, source, pattern)
    if not problem.strip():
        raise ValueError(f"{location}: `{source.problem_column}` is empty; expected the text of a problem")
    columns = {name: _column(record, name, location, "columns") for name in source.columns}
    return DataRow(problem, answer, label, location, columns)


def _own_row(record: Mapping[str, Any], location: str, source: DataSourceConfig, label: str) -> DataRow:
    problem = _text(record, source.problem_column, location, "problem_column")
    if not problem.strip():
        raise ValueError(f"{location}: `{source.problem_column}` is empty; expected the text of a problem")
    answer = _text({source.answer_column: "", **record}, source.answer_column, location, "answer_column")
    taken = (source.problem_column, source.answer_column)
    columns = {name: value for name, value in record.items() if name not in taken}
    return DataRow(problem, answer.strip(), label, location, columns)


def _column(record: Mapping[str, Any], name: str, location: str, setting: str) -> Any:
    if name not in record:
        near = difflib.get_close_matches(name, record, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else "."
        has = ", ".join(map(str, record))
        names = "`columns`" if setting == "columns" else "`problem_column` and `answer_column`"
        raise MissingColumn(
            f"{location}: no column `{name}`{hint} The row has: {has}. Set {names} of the data source",
            setting,
        )
    return record[name]


def _answer(answer: str, location: str, source: DataSourceConfig, pattern: PatternSearch) -> str:
    if source.answer_pattern is not None:
        try:
            found = pattern.search(answer)
        except PatternTimeout:
            raise ValueError(
                f"{location}: answer_pattern {source.answer_pattern!r} does not finish within "
                f"{pattern.timeout_s:g} s on `{source.answer_column}` ({len(answer)} characters): "
                f"...{answer[-60:]!r}; use a pattern without nested repetitions ((a+)+ is one)"
            ) from None
        if found is None:
            raise ValueError(
                f"{location}: `{source.answer_column}` does not match answer_pattern "
                f"{source.answer_pattern!r}: ...{answer[-60:]!r}; fix the row or the pattern"
            )
        answer = (found[0] or "").strip()
    if not answer:
        raise ValueError(
            f"{location}: `{source.answer_column}` is empty; a problem without an answer cannot be "
            "graded: remove the row"
        )
    return answer


def _text(record: Mapping[str, Any], name: str, location: str, setting: str) -> str:
    """Return a column as text: 8 and 8.0 are "8", None is "".

    Raises ValueError for an infinite number, a boolean, a list or an object.
    """
    value = _column(record, name, location, setting)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and math.isinf(value):
        raise ValueError(f"{location}: `{name}` is {value}; expected text or a finite number: remove the row")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Decimal) and value.is_finite():
        shown = format(value, "f")
        return shown.rstrip("0").rstrip(".") if "." in shown else shown
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, date):
        raise ValueError(
            f"{location}: `{name}` is a {type(value).__name__} ({value}); expected text or a number; "
            "store it as text. (Of a directory or hub id, `datasets` reads JSON text that looks like a date "
            "as one: name the file itself)"
        )
    raise ValueError(
        f"{location}: `{name}` is a {type(value).__name__} ({str(value)[:60]}); expected text or a number; "
        "set `problem_column` and `answer_column` to columns of text"
    )
