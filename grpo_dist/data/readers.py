"""Reads data sources into rows of problem and answer. Every error names the file and the row.

Messages of a row may have any of these forms:

[{"role": "user", "content": "1+1="}]                                       the form of chat templates
[{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]           content in parts
[{"from": "human", "value": "1+1="}]                                        ShareGPT
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import math
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from itertools import islice, repeat
from operator import add, attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
import regex

from grpo_dist.chat.template import convert_arguments, parse_arguments
from grpo_dist.config import DataConfig, DataSourceConfig
from grpo_dist.config.text import fill, names_in
from grpo_dist.data.columns import (
    STORED_FROM,
    Column,
    Computed,
    Numbers,
    Repeated,
    Table,
    Texts,
    each_place,
    files_digest,
    files_state,
    hex_texts,
    load,
    record_hash,
    save,
    sorted_distinct,
    store_key,
)
from grpo_dist.data.files import OtherValues, text_columns
from grpo_dist.data.sources import EnvironmentProblems, records, source_files
from grpo_dist.environments.base import Message
from grpo_dist.errors import expanded

# Messages


_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool"}
_EXPECTED = "expected a list of objects with `role` and `content`"


def is_conversation(value: Any) -> bool:
    """Return whether ``value`` is a list of messages, well-formed or not."""
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)
    )


def read_messages(value: Any, column: str) -> list[Message]:
    """Return messages as a chat template takes them, without keys that are None, also in tool calls, whose
    arguments may be JSON text.

    Raises ValueError, which names the ``column``, for a value that is no list of messages, and for content
    other than text.
    """
    if not is_conversation(value):
        raise ValueError(f"`{column}`: {str(value)[:60]!r} is no conversation; {_EXPECTED}")
    try:
        return [_message(number, message) for number, message in enumerate(value)]
    except ValueError as error:
        raise ValueError(f"`{column}`: {error}") from error


def _message(number: int, message: Mapping[str, Any]) -> Message:
    other_keys = {key: item for key, item in drop_none(message).items() if key not in ("from", "value")}
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise ValueError(f"message {number} has the role {role!r}; {_EXPECTED}, both text")
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    calls = role == "assistant" and message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(
            f"message {number} has the content {str(content)[:60]!r}; {_EXPECTED}, both text (an assistant's "
            "message with `tool_calls` may have no `content`)"
        )
    other_keys |= {"role": _ROLES.get(role, role), "content": content}
    return convert_arguments(other_keys, parse_arguments)


def drop_none(value: Any) -> Any:
    """Convert ``value`` to JSON types, in which prompts are hashed and written, without keys that are None:
    rows of a table have the keys of all rows.
    """
    if isinstance(value, Mapping):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_none(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _part(number: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ValueError(f"message {number} has a part of type {kind}; expected text alone: remove the row")
    return text


# Sources


PATTERN_S = 10.0  # processor time of answer_pattern on one row: a search may hang, as (a|aa)+$ does
_LONGEST_JSON = 10_000  # characters; errors list no nested columns of longer text
LARGE = 2**22  # bytes of a file from which Arrow is worth its slow import
_NAMED = 30  # columns that a message lists
_ROW_INDEPENDENT_KEYS = {"weight", "temperature", "algorithm"}  # keys of a source that don't affect its rows


@dataclass(frozen=True, slots=True)
class DataRow:
    """One problem of a data source.

    Attributes:
        problem: text of the problem; for messages, of the last user message.
        location: ``gsm8k.jsonl:17``, for error messages.
        messages: the prompt as a conversation, where it has more than the problem.
        values: values of the columns that the source's `template` names, as text.
        left_out: the removed last message of the assistant, which the policy writes instead; "": none.
    """

    problem: str
    answer: str
    source: str
    location: str
    columns: Mapping[str, Any]
    messages: tuple[Message, ...] = ()
    left_out: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


_FIELDS = attrgetter("columns", "messages", "left_out", "values")  # empty in most rows
_Further = tuple[Mapping[str, Any], tuple[Message, ...], str, Mapping[str, str]]  # values of `_FIELDS`


@dataclass(eq=False)
class RowTable(Table, Computed[DataRow]):
    """Rows as columns; access builds a `DataRow`.

    Attributes:
        further: JSON of `_FIELDS`; "": all of them are empty.
        uids, problem_hashes: uint64, hashes of problem and answer, and of the stripped problem.
        lines: int64, -1 where a location has no line.
        sources, files: source of each row, and the part of its location before the line.
        others: `_FIELDS` that JSON would change, by row number.
    """

    problems: Texts
    answers: Texts
    further: Texts
    uids: np.ndarray
    problem_hashes: np.ndarray
    lines: np.ndarray
    sources: Repeated[str]
    files: Repeated[str]
    others: Mapping[int, _Further] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether each row is a problem and an answer."""
        return not self.others and not self.further.lengths.any()

    def __len__(self) -> int:
        return len(self.uids)

    def _get(self, number: int) -> DataRow:
        problem, answer, source = self.problems[number], self.answers[number], self.sources[number]
        location = join_location(self.files[number], self.lines[number])
        return DataRow(problem, answer, source, location, *self._further(number))

    def column(self, name: str) -> Iterable[Any]:
        """Return an attribute of all rows."""
        if name in ("problem", "answer", "source"):
            return {"problem": self.problems, "answer": self.answers, "source": self.sources}[name]
        if name == "uid":
            names = [f"{source}-" for source in self.sources.distinct]
            return map(add, map(names.__getitem__, self.sources.codes.tolist()), hex_texts(self.uids))
        index = ("columns", "messages", "left_out", "values").index(name)
        if self.is_plain:
            return repeat(_NOTHING[index], len(self))
        return (self._further(number)[index] for number in range(len(self)))

    def uid(self, number: int) -> str:
        """Return an id that depends on the source, the problem and the answer of a row."""
        return f"{self.sources[number]}-{self.uids[number]:016x}"

    def select(self, numbers: np.ndarray) -> Self:
        chosen = enumerate(numbers.tolist() if self.others else ())
        others = {i: self.others[number] for i, number in chosen if number in self.others}
        return replace(super().select(numbers), others=others)

    def _further(self, number: int) -> _Further:
        if number in self.others:
            return self.others[number]
        if not (stored := self.further[number]):
            return {}, (), "", {}
        columns, messages, left_out, values = json.loads(stored)
        return columns, tuple(messages), left_out, values


_NOTHING: tuple[Any, ...] = ({}, (), "", {})


class Names:
    """Collects names with few distinct values."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._codes = array("i")

    def append(self, name: str, times: int = 1) -> None:
        self._codes.extend([self._numbers.setdefault(name, len(self._numbers))] * times)

    def repeated(self) -> Repeated[str]:
        return Repeated(list(self._numbers), np.array(self._codes))


class Locations:
    """Collects locations of rows: file names, and lines, -1 where a location is only a name."""

    def __init__(self) -> None:
        self._names, self._lines = Names(), array("q")

    def append(self, location: str) -> None:
        name, _, line = location.rpartition(":")
        is_number = line.isascii() and line.isdigit() and (line == "0" or line[0] != "0")
        name, number = (name, int(line)) if name and is_number else (location, -1)
        self._names.append(name)
        self._lines.append(number)

    def extend(self, file: str, lines: Sequence[int] | np.ndarray) -> None:
        self._names.append(file, len(lines))
        self._lines.frombytes(np.asarray(lines, np.int64).tobytes())

    def columns(self) -> tuple[Repeated[str], np.ndarray]:
        """Return the files, and the lines, int64."""
        return self._names.repeated(), np.array(self._lines)


class _RowWriter:
    """Collects rows as columns."""

    def __init__(self) -> None:
        self._problems, self._answers, self._further = Column(), Column(), Column()
        self._uids, self._hashes = array("Q"), array("Q")
        self._sources, self._locations = Names(), Locations()
        self._others: dict[int, _Further] = {}

    def append(self, row: DataRow) -> None:
        prompt, dumped = row.problem, b""
        if (further := _FIELDS(row)) != _NOTHING:
            prompt = json.dumps(row.messages, sort_keys=True) if row.messages else prompt
            stored = _dumped(further)
            if stored is None:
                self._others[len(self._uids)] = further
            dumped = stored or b""
        self._problems.append_text(row.problem)
        self._answers.append_text(row.answer)
        self._further.append(dumped)
        self._uids.append(_hash(f"{prompt}\x1f{row.answer}"))
        self._hashes.append(_hash(row.problem.strip()))
        self._sources.append(row.source)
        self._locations.append(row.location)

    def extend_plain(
        self,
        problems: Sequence[str],
        answers: Sequence[str],
        uids: np.ndarray,
        lines: np.ndarray,
        names: tuple[str, str],
    ) -> None:
        """Append rows with only a problem and an answer; ``names``: their source and file."""
        count = len(uids)
        self._problems.extend(list(map(_encoded, problems)))
        self._answers.extend(list(map(_encoded, answers)))
        self._further.extend([b""] * count)
        self._uids.frombytes(uids.tobytes())
        self._hashes.frombytes(hashes_of(map(_encoded, map(str.strip, problems))).tobytes())
        self._sources.append(names[0], count)
        self._locations.extend(names[1], lines)

    def table(self) -> RowTable:
        files, lines = self._locations.columns()
        return RowTable(
            self._problems.texts(),
            self._answers.texts(),
            self._further.texts(),
            np.array(self._uids),
            np.array(self._hashes),
            lines,
            self._sources.repeated(),
            files,
            self._others,
        )


def hash_of(content: bytes) -> int:
    """Return a 64-bit hash, stable across runs and row order, as a row's uid must be."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def hashes_of(contents: Iterable[bytes]) -> np.ndarray:
    """Return `hash_of` of each content, uint64."""
    digests = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def _hash(text: str) -> int:
    return hash_of(_encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _dumped(further: _Further) -> bytes | None:
    """Return ``further`` as JSON; None where it would not survive the round trip."""
    columns, messages, left_out, values = further
    try:
        row_fields = [columns, list(messages), left_out, values]
        return json.dumps(row_fields).encode() if _is_json(row_fields) else None
    except (ValueError, RecursionError):  # an integer of thousands of digits, a column that contains itself
        return None


def _is_json(value: Any) -> bool:
    """Return whether ``value`` survives a JSON round trip."""
    if type(value) is list:
        return all(map(_is_json, value))
    if type(value) is dict:
        return all(type(key) is str and _is_json(inner) for key, inner in value.items())
    return value is None or type(value) in (str, int, float, bool)


class DataRows(Repeated[DataRow]):
    """Rows of a data source. A distinct row has the location of its first occurrence.

    ``files``, ``lines``: location of each row, as in `RowTable`. ``key``: cache key of the rows, see
    `columns.store_key`; "": unknown.
    """

    distinct: RowTable

    def __init__(
        self,
        distinct: RowTable,
        codes: np.ndarray,
        files: Repeated[str],
        lines: np.ndarray,
        key: str = "",
    ) -> None:
        super().__init__(distinct, codes)
        self.files, self.lines, self.key = files, lines, key

    @classmethod
    def from_rows(cls, rows: Sequence[DataRow]) -> DataRows:
        """Return ``rows`` as `DataRows`, each distinct unless they are `DataRows` already."""
        if isinstance(rows, DataRows):
            return rows
        writer = _RowWriter()
        for row in rows:
            writer.append(row)
        table = writer.table()
        return cls(table, np.arange(len(rows), dtype=np.int32), table.files, table.lines)

    def _get(self, place: int) -> DataRow:
        return replace(self.distinct[int(self.codes[place])], location=self.location(place))

    def location(self, place: int) -> str:
        return join_location(self.files[place], self.lines[place])

    def uids(self) -> Iterator[str]:
        """Yield the uid of each row, independent of the tokenizer."""
        uids = self.distinct.column("uid")
        return iter(uids if self.is_distinct else each_place(uids, self.codes))

    def apart(self) -> DataRows:
        """Return the rows as if all were distinct."""
        return self if self.is_distinct else DataRows.from_rows(list(self))

    def select(self, places: np.ndarray) -> DataRows:
        """Return the rows at ``places``, int64 in order. A distinct row keeps its first place as location."""
        chosen, codes = np.unique(self.codes[places], return_inverse=True)
        key = self.key and store_key([self.key, hashlib.sha256(places.tobytes()).hexdigest()])
        return DataRows(
            self.distinct.select(chosen),
            codes.astype(np.int32),
            self.files.select(places),
            self.lines[places],
            key,
        )


def join_location(file: str, line: int) -> str:
    return file if line < 0 else f"{file}:{line}"


def read(
    source: DataSourceConfig, own: EnvironmentProblems | None = None, *, asked: Collection[str] = ()
) -> DataRows:
    """Read the rows of ``source``, at most ``max_rows``; large sources are cached for the next start.

    Args:
        own: reads a source that is a user's function, or whose environment brings the problems.
        asked: columns that rows keep besides `columns`, where they have them.

    Raises ValueError, which names file and row, for a missing file or split, a malformed row, a missing
    column, a row without problem or answer, or an empty data set.
    """
    is_small = source.max_rows is not None and source.max_rows < STORED_FROM
    files = [] if is_small else source_files(source)  # hashing a whole file for its first rows is slow
    if not files:
        return _read_columns(source, own, asked, "")
    before = files_state(files)
    settings = source.model_dump(mode="json", exclude=_ROW_INDEPENDENT_KEYS)
    key = store_key(["rows", [settings, sorted(asked), files_digest(files)], list(map(str, files))])
    if (stored := load(key)) is not None:
        arrays, (names, file_names) = stored
        table, row_files = RowTable.from_store(arrays, names), Repeated(file_names, arrays["row_files"])
        return DataRows(table, arrays["rows"], row_files, arrays["row_lines"], key)
    rows_read = None
    is_large = sum(size for size, _ in before) > LARGE
    if is_large and not asked and files == [expanded(str(source.path))]:
        rows_read = _read_plain(source, files[0], key)
    if rows_read is None:
        rows_read = _read_columns(source, own, asked, key)
    if files_state(files) != before:
        rows_read.key = ""  # a file changed meanwhile: the rows may not match the hash
    elif len(rows_read) >= STORED_FROM and not rows_read.distinct.others:
        arrays, names = rows_read.distinct.stored()
        row_files = rows_read.files
        arrays |= {"rows": rows_read.codes, "row_files": row_files.codes, "row_lines": rows_read.lines}
        save(key, arrays, [names, list(row_files.distinct)])
    return rows_read


def _read_columns(
    source: DataSourceConfig, own: EnvironmentProblems | None, asked: Collection[str], key: str
) -> DataRows:
    names = () if brings_columns(source) else [*_top_columns(source), *asked]
    try:
        return _read(source, own, names, asked, key)
    except (MissingColumn, _WrongKind):
        if not names:
            raise
        # The table was read with only the needed columns; the error must list all.
        return _read(source, own, (), asked, key)


def _read(
    source: DataSourceConfig,
    own: EnvironmentProblems | None,
    names: Sequence[str],
    asked: Collection[str],
    key: str,
) -> DataRows:
    label, may_repeat = source.label, not (brings_columns(source) or source.is_own)
    writer, numbers, locations = _RowWriter(), Numbers(), Locations()
    for location, record in records(source, own, names):
        if source.max_rows is not None and len(numbers.codes) >= source.max_rows:
            break
        if numbers.add(record_hash(record) if may_repeat and numbers.finds_repeats else None):
            row = _row(record, location, source, label)
            more = {name: record[name] for name in asked if name in record and name not in row.columns}
            writer.append(replace(row, columns={**row.columns, **more}) if more else row)
        locations.append(location)
    if not numbers.codes:
        raise ValueError(
            f"{source.path or label}: no rows; expected at least one with `{source.problem_column}` and "
            f"`{source.answer_column}`"
        )
    return DataRows(writer.table(), np.array(numbers.codes), *locations.columns(), key)


def _read_plain(source: DataSourceConfig, file: Path, key: str) -> DataRows | None:
    """Read the rows of ``file`` as `_read` does, but without an object per row. None where only `_read` can:
    rows have more than a text problem and a text answer, or a row is malformed.
    """
    settings = (source.problem_template, source.system_column, source.history_column, source.answer_pattern)
    has_part = not re.fullmatch(r"\w+", source.split)
    if source.template or source.columns or has_part or any(setting is not None for setting in settings):
        return None
    names, label, most = (source.problem_column, source.answer_column), source.label, source.max_rows
    if any("." in name for name in names) or source.subset is not None:
        return None
    name, writer = str(expanded(str(source.path))), _RowWriter()
    numbers = Numbers()
    try:
        for first, (problems, answers) in text_columns(file, name, names):
            if most is not None:
                rest = most - len(numbers.codes)
                problems, answers = problems[:rest], answers[:rest]
            golds = list(map(str.strip, answers))
            has_messages = "\0[{" in "\0".join(["", *problems])
            has_several = '\0["' in "\0".join(["", *answers])
            if has_messages or has_several or not all(golds) or not all(map(str.strip, problems)):
                return None
            uids = hashes_of(map(_encoded, map("{}\x1f{}".format, problems, golds)))
            new = numbers.extend(uids)
            texts, new_golds = ([values[row] for row in new] for values in (problems, golds))
            writer.extend_plain(texts, new_golds, uids[new], first + np.array(new, np.int64), (label, name))
            if len(numbers.codes) == most:
                break
    except OtherValues:
        return None
    if not numbers.codes:
        return None
    codes = np.array(numbers.codes)
    lines = np.arange(1, len(codes) + 1, dtype=np.int64)
    return DataRows(writer.table(), codes, Repeated([name], np.zeros(len(codes), np.int32)), lines, key)


class _WrongKind(ValueError):
    """A column has values other than text or numbers."""


class MissingColumn(ValueError):
    """A row lacks the column that ``setting`` of its data source names."""

    def __init__(self, message: str, setting: str) -> None:
        super().__init__(message, setting)
        self.message, self.setting = message, setting

    def __str__(self) -> str:
        return self.message


def read_all(
    sources: Sequence[DataSourceConfig],
    key: str = "",
    own: EnvironmentProblems | None = None,
    *,
    asked: Collection[str] = (),
    first: int = 0,
) -> list[tuple[DataSourceConfig, DataRows]]:
    """Read every source. ``key``: the configuration key of the sources, and ``first``: the number of the
    first source there, both for error messages; ``own`` and ``asked`` as in `read`.
    """
    sources_read = []
    for number, source in enumerate(sources, first):
        try:
            sources_read.append((source, read(source, own, asked=asked)))
        except MissingColumn as error:
            if not key:
                raise
            raise ValueError(f"{error}, here `{key}.{number}.{error.setting}`") from error
    return sources_read


def common_columns(source: DataSourceConfig, own: EnvironmentProblems | None = None) -> list[str]:
    """Return the columns that all rows have, also nested ones; [] without rows. Errors: see `read`."""
    rows = (record for _, record in islice(records(source, own), source.max_rows))
    names = dict.fromkeys(column_names(next(rows, {})))
    for record in rows:
        names = {name: None for name in names if has_column(record, name)}
    return list(names)


def brings_columns(source: DataSourceConfig) -> bool:
    """Return whether rows keep all columns, whatever `columns` names: environments and reasoning-gym use
    them for scoring.
    """
    return source.path is None or source.is_generated_by_reasoning_gym


# Columns


def has_column(record: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has the column ``name``, which may be nested."""
    try:
        column(record, name)
    except KeyError:
        return False
    return True


def column(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column. Dots lead into lists and objects, also objects stored as text.

        {"reward_model": {"ground_truth": "7"}}, "reward_model.ground_truth" -> "7"
        {"messages": [{"content": "1+1="}]}, "messages.-1.content" -> "1+1="

    None where an object on the path is None. Raises KeyError for a column that the row lacks.
    """
    return record[name] if name in record else _nested(record, name.split("."))


def _nested(value: Any, path: Sequence[str]) -> Any:
    if not path or value is None:
        return value
    if isinstance(value, str):
        value = _stored_in(value)
    if isinstance(value, Mapping):
        for size in range(1, len(path) + 1):  # names may contain dots
            if (name := ".".join(path[:size])) in value:
                return _nested(value[name], path[size:])
    elif isinstance(value, list) and re.fullmatch(r"-?\d+", path[0]):
        try:
            return _nested(value[int(path[0])], path[1:])
        except IndexError:
            pass
    raise KeyError(".".join(path))


def _stored_in(text: str) -> Any:
    """Return the object or list in ``text``, in JSON or in Python's notation, which pandas writes to CSV.
    None for other text.
    """
    if text[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if not text.startswith(("{'", "[{'", "['")):
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def column_names(record: Mapping[str, Any]) -> list[str]:
    """Return the column names of a row; an object's name is followed by its nested names.

    {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}}
    -> prompt, prompt.0.role, prompt.0.content, reward_model, reward_model.ground_truth
    """
    names = []
    for name, value in record.items():
        names.append(str(name))
        if isinstance(value, str):
            value = _stored_in(value) if len(value) <= _LONGEST_JSON else None
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            value = {"0": value[0]}
            names += [f"{name}.{inner}" for inner in column_names(value)[1:]]
        elif isinstance(value, Mapping):
            names += [f"{name}.{inner}" for inner in column_names(value)]
    return names


def _top_columns(source: DataSourceConfig) -> list[str]:
    """Return the columns of a table that ``source`` may read: names may contain dots.

    reward_model.ground_truth -> reward_model, reward_model.ground_truth
    """
    template = source.problem_template
    problem = [source.problem_column] if template is None else names_in(template)
    problem += names_in(source.template or "")
    earlier = [name for name in (source.system_column, source.history_column) if name is not None]
    names = [*problem, *earlier, source.answer_column, *source.columns]
    parts = [name.split(".") for name in names]
    return list(dict.fromkeys(".".join(path[:size]) for path in parts for size in range(1, len(path) + 1)))


def _column(record: Mapping[str, Any], name: str, location: str, setting: str) -> Any:
    try:
        return column(record, name)
    except KeyError:
        pass
    names = column_names(record)
    last = name.rpartition(".")[2]
    near = [candidate for candidate in names if candidate.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else "."
    both = "`problem_column` and `answer_column`"
    settings = both if setting in ("problem_column", "answer_column") else f"`{setting}`"
    literal = f"; {{{{{name}}}}} is the text {{{name}}}" if setting.endswith("template") else ""
    raise MissingColumn(
        f"{location}: no column `{name}`{hint} The row has: {_listed(names)}. Set {settings} of the data "
        f"source{literal}",
        setting,
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# Rows


def _row(record: Mapping[str, Any], location: str, source: DataSourceConfig, label: str) -> DataRow:
    problem, messages, left_out = _problem(record, location, source)
    if earlier := _earlier_turns(record, location, source, messages):
        messages = (*earlier, *(messages or ({"role": "user", "content": problem},)))
    if not problem.strip():
        name = source.problem_column if source.problem_template is None else "problem_template"
        raise ValueError(f"{location}: `{name}` is empty; expected the text of a problem")
    if brings_columns(source):  # an environment may score without an answer
        record = {source.answer_column: "", **record}
        answer = _text(record, source.answer_column, location, "answer_column").strip()
        used = (source.problem_column, source.answer_column)
        columns = {name: value for name, value in record.items() if name not in used}
    else:
        answer = _answer(record, location, source)
        columns = {name: _column(record, name, location, "columns") for name in source.columns}
    names = [name for name in names_in(source.template or "") if name != "problem"]
    values = {name: _filled(record, name, location, "template") for name in names}
    return DataRow(problem, answer, label, location, columns, messages, left_out, values)


def _problem(
    record: Mapping[str, Any], location: str, source: DataSourceConfig
) -> tuple[str, tuple[Message, ...], str]:
    """Return the text of the problem, the conversation around it, and the removed answer at its end."""
    if (template := source.problem_template) is not None:
        return fill(template, lambda name: _filled(record, name, location, "problem_template")), (), ""
    name, template_names = source.problem_column, names_in(source.template or "")
    if template_names and "problem" not in template_names and not has_column(record, name):
        return fill(source.template or "", lambda name: _filled(record, name, location, "template")), (), ""
    value = _column(record, name, location, "problem_column")
    if isinstance(value, str) and value.startswith("[{") and is_conversation(stored := _stored_in(value)):
        value = stored
    if not is_conversation(value):
        return _as_text(value, name, location, record), (), ""
    try:
        messages, left_out = read_messages(value, name), ""
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from error
    while messages and messages[-1]["role"] == "assistant":
        left_out = str(messages.pop()["content"] or "tool calls")
    questions = [message["content"] for message in messages if message["role"] == "user"]
    if not questions:
        raise ValueError(f"{location}: `{name}` has no user message; expected one, which the policy answers")
    is_lone = len(messages) == 1 and set(messages[0]) == {"role", "content"}
    return questions[-1], () if is_lone else tuple(messages), left_out


def _earlier_turns(
    record: Mapping[str, Any], location: str, source: DataSourceConfig, messages: Sequence[Message]
) -> list[Message]:
    """Return the turns of `system_column` and `history_column`, which precede the problem or ``messages``."""
    turns: list[Message] = []
    if (name := source.system_column) is not None:
        system = _text(record, name, location, "system_column")
        if system.strip():
            turns.append({"role": "system", "content": system})
    if (name := source.history_column) is not None:
        pairs = _column(record, name, location, "history_column") or []
        if isinstance(pairs, str):
            pairs = _stored_in(pairs)
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
            for pair in pairs
        ):
            raise ValueError(
                f"{location}: `{name}` is {str(pairs)[:60]!r}; expected a list of pairs of question and "
                "answer, both text: correct the row, or remove `history_column`"
            )
        for question, reply in pairs:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    if turns and messages and (len(turns) > 1 or any(m["role"] == "system" for m in messages)):
        raise ValueError(
            f"{location}: `{source.problem_column}` has a system prompt or earlier turns, and so do "
            "`system_column` and `history_column`; remove these settings, or name a column of text"
        )
    return turns


def _filled(record: Mapping[str, Any], name: str, location: str, setting: str) -> str:
    value = _column(record, name, location, setting)
    if isinstance(value, list | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return _as_text(value, name, location, record)


def _answer(record: Mapping[str, Any], location: str, source: DataSourceConfig) -> str:
    name = source.answer_column
    value = _column(record, name, location, "answer_column")
    if isinstance(value, str) and value.startswith('["') and source.answer_pattern is None:
        values = _stored_in(value)  # Skywork-OR1 stores golds as JSON lists of texts
        value = values if isinstance(values, list) and all(isinstance(v, str) for v in values) else value
    values = value if isinstance(value, list) else [value]
    texts = [_as_text(value, name, location, record).strip() for value in values]
    answers = list(dict.fromkeys(_matched(text, location, source) for text in texts))
    if not answers or not all(answers):
        raise ValueError(
            f"{location}: `{name}` is empty; a problem without an answer cannot be graded: remove the row"
        )
    if len(answers) == 1:
        return answers[0]
    # The format that `grpo_dist.rewards.text.alternatives` reads.
    return ", ".join(answers) if source.multiple_answers == "all" else json.dumps(answers, ensure_ascii=False)


def _matched(answer: str, location: str, source: DataSourceConfig) -> str:
    """Return the match of `answer_pattern` in ``answer``."""
    if source.answer_pattern is None:
        return answer
    try:
        match = regex.search(source.answer_pattern, answer, timeout=PATTERN_S)
    except TimeoutError:
        raise ValueError(
            f"{location}: answer_pattern {source.answer_pattern!r} does not finish within "
            f"{PATTERN_S:g} s on `{source.answer_column}` ({len(answer)} characters): "
            f"...{answer[-60:]!r}; use a pattern that matches a text in one way ((a|aa)+ matches in many)"
        ) from None
    if match is None:
        raise ValueError(
            f"{location}: `{source.answer_column}` does not match answer_pattern "
            f"{source.answer_pattern!r}: ...{answer[-60:]!r}; fix the row or the pattern"
        )
    return (match[1] or "").strip()


def _text(record: Mapping[str, Any], name: str, location: str, setting: str) -> str:
    return _as_text(_column(record, name, location, setting), name, location, record)


def _as_text(value: Any, name: str, location: str, record: Mapping[str, Any]) -> str:
    """Return a value of the column ``name`` as text: 8 and 8.0 are "8", None is "".

    Raises ValueError for an infinite number, a boolean, a list or an object.
    """
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and math.isinf(value):
        raise ValueError(f"{location}: `{name}` is {value}; expected text or a finite number: remove the row")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Decimal) and value.is_finite():
        digits = format(value, "f")
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    kind = type(value).__name__
    if isinstance(value, date):
        raise ValueError(
            f"{location}: `{name}` is a {kind} ({value}); expected text or a number; store it as text"
        )
    readable = [candidate for candidate in column_names(record) if _is_readable(column(record, candidate))]
    raise _WrongKind(
        f"{location}: `{name}` is a {kind} ({str(value)[:60]}); expected text or a number; set "
        f"`problem_column` and `answer_column` to columns that have them ({_listed(readable) or 'none'}), "
        "or write the problem from columns with `problem_template`"
    )


def _is_readable(value: Any) -> bool:
    return is_conversation(value) or (isinstance(value, str | int | float) and not isinstance(value, bool))


# Rows that repeat a problem, and rows that refer to an image


SourceRows = tuple[DataSourceConfig, Sequence[DataRow]]
Pair = tuple[DataRow, DataRow]  # two rows with the same problem, the earlier first


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Rows that repeat an earlier problem, within a source or across sources.

    Attributes:
        sources: each source with its rows, and whether each row is the first of its problem, bool [n].
        rows, repeats: number of all rows, and of rows that repeat an earlier problem.
        example: a row and its repeat; None: no row repeats.
        disagreements: two rows with different answers, for each problem that has such rows.
    """

    sources: list[tuple[DataSourceConfig, DataRows, np.ndarray]]
    rows: int
    repeats: int
    example: Pair | None
    disagreements: list[Pair]

    @property
    def first(self) -> list[SourceRows]:
        """Return the first row of each problem, by source."""
        return [(source, rows.select(np.flatnonzero(is_first))) for source, rows, is_first in self.sources]

    def warnings(self, key: str, *, deduplicated: bool) -> list[str]:
        """Return warnings about repeats. ``key``: the configuration key of the sources."""
        if self.example is None:
            return []
        row, repeat = self.example
        text = (
            f"warning: {key}: {self.repeats} of {self.rows} rows repeat the problem of an earlier row "
            f"({self.rows - self.repeats} distinct), e.g. {repeat.location} repeats {row.location}; "
        )
        remedy = "only the first" if deduplicated else "data.deduplicate=true keeps only the first"
        warnings = [f"{text}{remedy} of each{' is kept' if deduplicated else ''}"]
        if self.disagreements:
            row, other = self.disagreements[0]
            warnings.append(
                f"warning: {key}: {len(self.disagreements)} problems have rows with different answers, e.g. "
                f"{row.answer[:40]!r} at {row.location} and {other.answer[:40]!r} at {other.location}; "
                "remove the wrong rows"
            )
        return warnings


def find_duplicates(data: DataConfig, sources: Sequence[SourceRows]) -> Duplicates:
    """Compare the problems of all rows, with their environment and template columns, without the white space
    around them.
    """
    tables = [(source, DataRows.from_rows(rows)) for source, rows in sources]
    hashes = [_problem_hashes(rows.distinct, data.environment_of(source), source) for source, rows in tables]
    begins = np.cumsum([0, *map(len, hashes)])
    joined = np.concatenate([np.empty(0, np.uint64), *hashes])
    first_of = np.arange(len(joined))  # the first row with the same problem, by distinct row of all sources
    if len(sorted_distinct(joined)) < len(joined):
        _, first, inverse = np.unique(joined, return_index=True, return_inverse=True)
        first_of = first[inverse]

    def row(number: int) -> DataRow:
        source = int(np.searchsorted(begins, number, side="right")) - 1
        return tables[source][1].distinct[number - int(begins[source])]

    disagreements: dict[int, Pair] = {}
    for number in np.flatnonzero(first_of != np.arange(len(first_of))).tolist():
        earlier, later = row(int(first_of[number])), row(number)
        if earlier.problem.strip() != later.problem.strip():  # 64-bit hashes may collide
            first_of[number] = number
        elif earlier.answer != later.answer:
            disagreements.setdefault(int(first_of[number]), (earlier, later))
    marked_sources, example = [], None
    for begin, (source, rows) in zip(begins[:-1].tolist(), tables, strict=True):
        first_rows = first_of[begin : begin + len(rows.distinct)]
        is_first = np.zeros(len(rows), bool)
        is_first[rows.first_places()[first_rows == np.arange(begin, begin + len(first_rows))]] = True
        if example is None and not is_first.all():
            place = int(np.argmin(is_first))
            example = row(int(first_rows[rows.codes[place]])), rows[place]
        marked_sources.append((source, rows, is_first))
    count = sum(len(rows) for _, rows in tables)
    repeated = count - sum(int(is_first.sum()) for _, _, is_first in marked_sources)
    return Duplicates(marked_sources, count, repeated, example, list(disagreements.values()))


def _problem_hashes(rows: RowTable, environment: str | None, source: DataSourceConfig) -> np.ndarray:
    """Return a hash of each row's problem, uint64: text, messages, template values, environment."""
    keeps_columns = brings_columns(source)
    if rows.is_plain and environment is None and not keeps_columns:
        return rows.problem_hashes

    def hashed(number: int, row: DataRow) -> int:
        if not (row.messages or row.values or environment is not None or keeps_columns):
            return int(rows.problem_hashes[number])
        parts = [environment, row.messages, row.values, row.columns if keeps_columns else None]
        return _hash(f"{row.problem.strip()}\x1f{json.dumps(parts, sort_keys=True, default=str)}")

    return np.fromiter((hashed(i, row) for i, row in enumerate(rows)), np.uint64, len(rows))


# Placeholders of data sets (LLaVA, MMMU, Geometry3K) and chat templates (Qwen, Gemma, Llama, Pixtral).
_MEDIA = re.compile(
    r"<(?:image|video|audio)(?:_?\d+)?>|<\|(?:image|video|audio)(?:_pad)?\|>|<\|vision_start\|>"
    r"|<start_of_image>|<image_soft_token>|\[IMG\]"
)
_MEDIA_WORDS = ("<image", "<video", "<audio", "<|image", "<|video", "<|audio", "<|vision", "_image>", "[IMG]")
_SEARCHED = 4096  # texts searched at once


def media_problem(rows: Sequence[DataRow]) -> str:
    """Return how many ``rows`` refer to an image, video or sound, and the first such row; "": none does."""
    rows = DataRows.from_rows(rows)
    problems = rows.distinct.problems
    has_media = np.zeros(len(problems), bool)
    for begin in range(0, len(problems), _SEARCHED):
        texts = problems[begin : begin + _SEARCHED]
        joined = "\0".join(texts)
        if any(word in joined for word in _MEDIA_WORDS):  # ten times faster than the pattern
            has_media[begin : begin + len(texts)] = [bool(_MEDIA.search(text)) for text in texts]
    places = np.flatnonzero(has_media[rows.codes])
    if not len(places):
        return ""
    row = rows[int(places[0])]
    match = _MEDIA.search(row.problem)
    assert match is not None
    return (
        f"{len(places)} of {len(rows)} problems have a placeholder for an image, video or sound (the "
        f"first is {row.location}, {match[0]}), and the model reads text alone; remove such rows"
    )
