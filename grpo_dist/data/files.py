"""Rows of data files. Values keep the types of the file: text stays text, whatever it looks like.

    .jsonl, .ndjson     an object per line
    .json               one list of objects, or consecutive objects
    .csv, .tsv          a header, then a record per row; every value is text
    .parquet, .arrow    tables

Text files may be compressed (.gz). A row that is a list of objects has the columns `0`, `1`, ...: each row of
Open-Reasoner-Zero's data is a list of two messages.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from grpo_dist.config.data import data_ending
from grpo_dist.config.text import check_characters

if TYPE_CHECKING:  # pyarrow takes a while to import, and text files do not need it
    import pyarrow as pa

Located = tuple[str, Mapping[str, Any]]  # location of a row, ``file:line``, and its columns

_BATCH = 4096  # rows of a table that become Python objects at once
_EXPECTED = "expected one list of objects, or one object per line"
_VALUE = re.compile(r"\S")
_PART_BYTES = 2**23  # JSON Lines parsed at once
_REMEMBERED = 2**26  # bytes of JSON Lines remembered to find equal lines
_LONGEST_FIELD = 2**31 - 1  # characters of a CSV field; the module's own limit is 131,072


def file_rows(path: Path, name: str = "", columns: Sequence[str] = ()) -> Iterator[Located]:
    """Yield the rows of a data file.

    Args:
        name: name of the file in locations, with an ending that `data_ending` supports; "": its path.
        columns: the needed columns. A table that has some of them is read without the others.

    Raises ValueError for a file that cannot be read, or for a malformed row.
    """
    name = name or str(path)
    ending = data_ending(name)
    if ending in (".parquet", ".arrow"):
        yield from table_rows(_batches(path, name, columns), name)
    elif ending in (".csv", ".tsv"):
        yield from _csv_rows(path, name, "," if ending == ".csv" else "\t")
    elif ending == ".json":
        yield from _json_rows(path, name)
    else:
        yield from json_lines(path, name)


class OtherValues(Exception):
    """`text_columns` does not support the file; `file_rows` reads it, or names the wrong row."""


def text_columns(
    path: Path, name: str, columns: Sequence[str], *, alone: bool = False
) -> Iterator[tuple[int, list[list[str]]]]:
    """Yield, for each part of a data file, the number of its first row and the texts of each of ``columns``.
    Takes a tenth of the time of `file_rows`. Rows are numbered from 1, one per line.

    Raises OtherValues for a file other than JSON Lines or Parquet, and for a part with a malformed row or a
    row in which one of ``columns`` is missing or not text; with ``alone`` also for other columns.
    """
    ending, number = data_ending(name), 1
    if ending == ".parquet":
        parts: Iterator[pa.Table | pa.RecordBatch] = _batches(path, name, () if alone else columns)
    elif ending in (".jsonl", ".ndjson") and not name.endswith(".gz"):
        parts = _parsed_lines(path, columns, others="error" if alone else "ignore")
    else:
        raise OtherValues
    for part in parts:
        texts = [part[column] for column in columns if column in part.schema.names]
        if len(texts) < len(columns) or any(text.null_count or not _is_text(text.type) for text in texts):
            raise OtherValues
        if alone and len(part.schema.names) > len(columns):
            raise OtherValues
        yield number, [text.to_pylist() for text in texts]
        number += len(part)


def _parsed_lines(
    path: Path, columns: Sequence[str], *, others: Literal["error", "ignore"]
) -> Iterator[pa.Table]:
    """Yield parts of a JSON Lines file as tables with the text ``columns``."""
    import pyarrow as pa  # heavy, as above
    from pyarrow.json import ParseOptions, read_json

    schema = pa.schema([(column, pa.string()) for column in columns])
    options = ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            lines = (part + file.readline()).removesuffix(b"\n")
            breaks = lines.count(b"\n")
            is_an_object_a_line = lines[:1] == b"{" and lines[-1:] == b"}" and lines.count(b"}\n{") == breaks
            try:
                lines.decode()
                table = read_json(pa.BufferReader(lines), parse_options=options)
                table.validate(full=True)
            except (pa.ArrowException, UnicodeDecodeError) as error:
                raise OtherValues from error
            if not is_an_object_a_line or len(table) != breaks + 1 or b"\\u0000" in lines:
                raise OtherValues
            yield table


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa  # heavy, as above

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def count_file_rows(path: Path, name: str) -> int:
    """Count the rows of a data file. Arguments and errors: see `file_rows`."""
    if data_ending(name) == ".parquet":
        from pyarrow.parquet import read_metadata  # heavy: text files do not need it

        with _readable_table(name):
            return int(read_metadata(path).num_rows)
    return sum(1 for _ in file_rows(path, name))


def json_lines(path: Path, name: str = "") -> Iterator[Located]:
    """Yield ``file:line`` and the object of every non-blank line. Equal lines may yield the same object.
    Raises ValueError for an invalid line.
    """
    name = name or str(path)
    rows: dict[bytes, Mapping[str, Any]] = {}
    room = _REMEMBERED
    # Line by line and as bytes, so that an invalid or undecodable line can be named.
    with _open(path, name) as file:
        for number, line in enumerate(_lines(file, name), 1):
            location = f"{name}:{number}"
            if (equal_row := rows.get(line)) is not None:
                yield location, equal_row
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                record = json.loads(text) if text.strip() else None
                if "\\u" in text:
                    check_characters(record)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{location}: {_complaint(error, 'expected one object per line')}"
                ) from error
            if record is None and not text.strip():
                continue
            if (row := _as_row(record)) is None:
                raise ValueError(f"{location}: {_kind(record)}; expected one JSON object per line")
            if number > 1 and len(line) <= room:  # the first line may begin with a byte order mark
                rows[line], room = row, room - len(line)
            yield location, row


def table_rows(batches: Iterable[pa.RecordBatch | pa.Table], name: str) -> Iterator[Located]:
    """Yield the rows of the parts of a table, numbered from 1: ``name:number``."""
    number = 0
    for batch in batches:
        for record in _records(batch):
            number += 1
            yield f"{name}:{number}", record


def _json_rows(path: Path, name: str) -> Iterator[Located]:
    """Yield location and object of every row of one list (``file:item``) or of consecutive objects
    (``file:line``). Every row has the columns of all rows, None where it lacks one.
    """
    try:
        with _open(path, name) as file:
            text = b"".join(_lines(file, name)).decode("utf-8-sig")
        is_list = text.lstrip().startswith("[")
        values = list(enumerate(json.loads(text), 1) if is_list else _objects(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {_complaint(error, _EXPECTED)}") from error
    rows = [(f"{name}:{number}", _row(f"{name}:{number}", value, text)) for number, value in values]
    columns = dict.fromkeys(column for _, row in rows for column in row)
    for location, row in rows:
        yield location, {**columns, **row}


def _objects(text: str) -> Iterator[tuple[int, Any]]:
    """Yield each value with the line on which it begins."""
    decoder, at, line = json.JSONDecoder(), 0, 1
    while begin := _VALUE.search(text, at):
        line += text.count("\n", at, begin.start())
        value, at = decoder.raw_decode(text, begin.start())
        yield line, value
        line += text.count("\n", begin.start(), at)


def _row(location: str, value: Any, text: str) -> Mapping[str, Any]:
    if (row := _as_row(value)) is None:
        raise ValueError(f"{location}: {_kind(value)}; {_EXPECTED}")
    if "\\u" in text:
        try:
            check_characters(value)
        except ValueError as error:
            raise ValueError(f"{location}: {_complaint(error, _EXPECTED)}") from error
    return row


def _as_row(value: Any) -> Mapping[str, Any] | None:
    """Return the columns of a JSON row; None if ``value`` is no row."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return value if isinstance(value, dict) else None


def _csv_rows(path: Path, name: str, delimiter: str) -> Iterator[Located]:
    """Yield each record's first line, and its fields by header name."""
    csv.field_size_limit(_LONGEST_FIELD)
    expected = f"expected a header and fields separated by {'commas' if delimiter == ',' else 'tabs'}"
    with _open(path, name) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        reader = csv.reader(_lines(text, name), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            location = f"{name}:{reader.line_num + 1}"
            try:
                fields = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                reason = _complaint(error, expected) if isinstance(error, UnicodeDecodeError) else None
                raise ValueError(f"{location}: {reason or f'not valid CSV ({error}); {expected}'}") from error
            if fields is None:
                return
            if not fields:  # a blank line
                continue
            if header is None:
                header = fields
                other = ";" if delimiter == "," else ","
                if len(fields) == 1 and other in fields[0]:
                    raise ValueError(
                        f"{location}: the header is one field, `{fields[0][:80]}`; {expected}: save the "
                        f"file with them instead of `{other}`"
                    )
                if doubled := next((column for column in header if header.count(column) > 1), None):
                    raise ValueError(f"{location}: the header has the column `{doubled}` twice; rename one")
            elif len(fields) != len(header):
                raise ValueError(
                    f"{location}: {len(fields)} fields, and the header has {len(header)}; put a field that "
                    "has the separator, a quote or a line break in double quotes"
                )
            else:
                yield location, dict(zip(header, fields, strict=True))


def _open(path: Path, name: str) -> IO[bytes]:
    return gzip.open(path) if name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _lines(file: Iterable[Any], name: str) -> Iterator[Any]:
    """Yield the lines of ``file``. Raises ValueError where a compressed file is damaged."""
    try:
        yield from file
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{name}: the file cannot be loaded ({error}); copy or compress it again") from error


def _batches(path: Path, name: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa  # heavy, as above
    from pyarrow.parquet import ParquetFile

    with _readable_table(name):
        if data_ending(name) == ".parquet":
            with ParquetFile(path) as table:
                needed = [name for name in columns if name in table.schema_arrow.names]
                yield from table.iter_batches(_BATCH, columns=needed or None)
            return
        with pa.memory_map(str(path)) as source:
            try:
                file = pa.ipc.open_file(source)
            except pa.ArrowInvalid:  # a stream, as the caches of `datasets` are
                yield from pa.ipc.open_stream(source)
            else:
                yield from (file.get_batch(number) for number in range(file.num_record_batches))


@contextmanager
def _readable_table(name: str) -> Iterator[None]:
    import pyarrow as pa  # heavy, as above

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{name}: the file cannot be loaded ({reason}); expected a table of the kind its ending says: "
            "copy or write it again"
        ) from error


def _records(batch: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    decoders = {field.name: decode for field in batch.schema if (decode := _decoder(field.type))}
    for record in batch.to_pylist():
        yield _decoded(decoders, record) if decoders else record


def _decoder(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that decodes the values of a column; None where they need no decoding.

    `datasets` stores a column with values of several kinds as JSON.
    """
    import pyarrow as pa  # heavy, as above

    if isinstance(kind, pa.JsonType):
        return _from_json
    if pa.types.is_struct(kind):
        fields = {field.name: decode for field in kind if (decode := _decoder(field.type))}
        return partial(_decoded, fields) if fields else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        decode = _decoder(kind.value_type)
        return (lambda value: value and [decode(item) for item in value]) if decode else None
    return None


def _decoded(decoders: Mapping[str, Callable[[Any], Any]], value: dict[str, Any] | None) -> Any:
    return value and value | {name: decode(value[name]) for name, decode in decoders.items()}


def _from_json(stored: str | None) -> Any:
    """Return the value that `datasets` stored as JSON. It stores text that is valid JSON unchanged, so text
    may look like a number; but no number is stored as 007 or 1e3, and no null as text.
    """
    if stored is None:
        return None
    try:
        value = json.loads(stored)
    except ValueError:
        return stored
    if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        return stored if ", " in stored else value  # `datasets` writes no spaces: an interval, not a list
    is_scalar = isinstance(value, bool | int | float)
    return stored if value is None or (is_scalar and json.dumps(value) != stored) else value


def _kind(value: Any) -> str:
    return "a null" if value is None else f"a JSON {type(value).__name__}"


def _complaint(error: Exception, expected: str) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 ({error.reason} at byte {error.start}); {expected}, in UTF-8"
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"not valid JSON ({error.msg} at {line}column {error.colno}); {expected}"
    return f"not valid JSON ({error}); {expected}"
