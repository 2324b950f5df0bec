"""JSON files of a run, and files with one JSON object a step. A run reads both back, damaged or not."""

from __future__ import annotations

import errno
import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_dist.runtime.files import write_text


def read_json(path: Path) -> Any:
    """Return the parsed contents of ``path``.

    Raises OSError for a file that cannot be read or is not a regular file (reading a pipe would never end),
    and ValueError for text that is not UTF-8 or not JSON, or is nested deeper than the parser's stack.
    """
    check_regular(path)
    return parse_json(path.read_bytes())


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device, which may have no end. Opening a directory fails by itself."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def parse_json(text: str | bytes) -> Any:
    """Return the parsed ``text``. Raises ValueError as `read_json`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def without_nan(value: Any) -> Any:
    """Return a copy of nested mappings and lists with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StepLines:
    """A file to which each step adds one JSON object as a line.

    Opening it drops the lines of steps after ``keep_through``: the resumed run writes them again.
    """

    def __init__(self, path: Path, *, keep_through: int) -> None:
        self._path = path
        write_text(path, "".join(kept_lines(path, keep_through)))

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def kept_lines(path: Path, through: int) -> list[str]:
    """Return the lines of steps up to ``through``. A last line that a kill has cut short is left out."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.splitlines(keepends=True)
    return [line for line in lines if _is_step_up_to(line, through)]


def _is_step_up_to(line: str, last: int) -> bool:
    try:
        return line.endswith("\n") and parse_json(line)["step"] <= last
    except (ValueError, KeyError, TypeError):  # cut short by a kill
        return False
