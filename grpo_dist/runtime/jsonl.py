"""A file of a run with one JSON object a step, of which a resumed run repeats the later ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.json_files import parse_json


class StepLines:
    """Lines are added. ``keep_through``: those of later steps are dropped, because they will come again."""

    def __init__(self, path: Path, *, keep_through: int) -> None:
        self._path = path
        write_text(path, "".join(kept_lines(path, keep_through)))

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def kept_lines(path: Path, through: int) -> list[str]:
    """Those of steps up to ``through``, without a last one that a kill has torn."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.splitlines(keepends=True)
    return [line for line in lines if _is_step_up_to(line, through)]


def _is_step_up_to(line: str, last: int) -> bool:
    try:
        return line.endswith("\n") and parse_json(line)["step"] <= last
    except (ValueError, KeyError, TypeError):  # torn
        return False
