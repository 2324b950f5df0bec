"""Rows of JSON files: one object per line, or one list of objects. Values keep the types of the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_dist.config.text import check_characters


def json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield location and object of every row: ``file:item`` of a list, ``file:line`` of lines. Raises
    ValueError for what is neither.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        begin = next((line for line in file if not line.isspace()), "")
    yield from _items(path) if begin.lstrip().startswith("[") else json_lines(path)


def _items(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    expected = "expected one list of objects, or one object per line"
    try:
        text = path.read_bytes().decode("utf-8-sig")
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {_complaint(error, expected)}") from error
    for number, item in enumerate(items, 1):
        location = f"{path}:{number}"
        if not isinstance(item, dict):
            raise ValueError(f"{location}: {_kind(item)} in the list; {expected}")
        if "\\u" in text:
            try:
                check_characters(item)
            except ValueError as error:
                raise ValueError(f"{location}: {_complaint(error, expected)}") from error
        yield location, item


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
