"""Rows of JSON files: one object per line, or one list of objects. Values keep the types of the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_dist.config.text import check_characters

_EXPECTED = "expected one list of objects, or one object per line"
_VALUE = re.compile(r"\S")


def json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield location and object of every row of one list, or of objects one after another: ``file:item`` or
    ``file:line``. Every row has the columns of all, None where it lacks one. Raises ValueError for what is
    neither.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        values = list(_items(text) if text.lstrip().startswith("[") else _objects(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {_complaint(error, _EXPECTED)}") from error
    rows = [(f"{path}:{number}", _row(f"{path}:{number}", value, text)) for number, value in values]
    columns = dict.fromkeys(name for _, row in rows for name in row)
    for location, row in rows:
        yield location, columns | row


def _items(text: str) -> Iterator[tuple[int, Any]]:
    yield from enumerate(json.loads(text), 1)


def _objects(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the line on which each value begins, and the value."""
    decoder, at, line = json.JSONDecoder(), 0, 1
    while begin := _VALUE.search(text, at):
        line += text.count("\n", at, begin.start())
        value, at = decoder.raw_decode(text, begin.start())
        yield line, value
        line += text.count("\n", begin.start(), at)


def _row(location: str, value: Any, text: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{location}: {_kind(value)}; {_EXPECTED}")
    if "\\u" in text:
        try:
            check_characters(value)
        except ValueError as error:
            raise ValueError(f"{location}: {_complaint(error, _EXPECTED)}") from error
    return value


def json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield ``file:line`` and the object of every non-blank line. Raises ValueError for an invalid line."""
    # Line by line and as bytes, so that an invalid or undecodable line can be named.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            location = f"{path}:{number}"
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
            if not isinstance(record, dict):
                raise ValueError(f"{location}: {_kind(record)}; expected one JSON object per line")
            yield location, record


def _kind(value: Any) -> str:
    return "a null" if value is None else f"a JSON {type(value).__name__}"


def _complaint(error: ValueError | RecursionError, expected: str) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 ({error.reason} at byte {error.start}); {expected}, in UTF-8"
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"not valid JSON ({error.msg} at {line}column {error.colno}); {expected}"
    return f"not valid JSON ({error}); {expected}"
