"""`metrics.jsonl`, the record of a run. A failed write ends the run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from grpo_dist.runtime.files import kept_lines, write_text

METRICS = "metrics.jsonl"


class MetricsFile:
    """One JSON object per step. NaN is written as null: JSON has no NaN."""

    def __init__(self, path: Path, *, keep_through: int) -> None:
        """Open the file with its lines up to ``keep_through`` (0: empty): a resumed run repeats the rest."""
        self._path = path
        self._last: dict[str, Any] | None = None
        lines = kept_lines(path, keep_through) if keep_through > 0 else []
        write_text(path, "".join(lines))
        self._last_offset = path.stat().st_size
        if lines:
            self._last = json.loads(lines[-1])
            self._last_offset -= len(lines[-1].encode())

    def _insert(self, step: int, values: dict[str, Any]) -> None:
        """Add metrics of an earlier step, whose evaluation ran while later steps were trained."""
        lines = {json.loads(line)["step"]: line for line in self._path.read_text().splitlines(keepends=True)}
        before = json.loads(lines[step]) if step in lines else {"step": step}
        lines[step] = json.dumps({**before, **values}) + "\n"
        write_text(self._path, "".join(lines[at] for at in sorted(lines)))
        self._last_offset = self._path.stat().st_size - len(lines[max(lines)].encode())

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step, or add them to its line, before returning."""
        values = {k: (v if math.isfinite(v) else None) for k, v in metrics.items()}
        if self._last is not None and step < self._last["step"]:
            self._insert(step, values)
            return
        joins = self._last is not None and self._last["step"] == step
        self._last = {**(self._last if joins and self._last else {"step": step}), **values}
        with self._path.open("rb+") as file:
            if not joins:
                self._last_offset = file.seek(0, os.SEEK_END)
            file.seek(self._last_offset)
            file.write((json.dumps(self._last) + "\n").encode())
            file.truncate()
