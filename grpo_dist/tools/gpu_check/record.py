"""The record of a check: one JSON file, whose benchmark `grpo-dist plan --bench` reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.json_files import without_nan
from grpo_dist.tools.gpu_check.findings import Claim

CHECK_SCHEMA = 3  # raise it when a figure changes its meaning
LineState = Literal["holds", "fails", "skipped", "not run"]


@dataclass(frozen=True, slots=True)
class LineRecord:
    """``state``: skipped for what the machine lacks, not run for want of time. ``seconds``: of the job that
    found it. ``reason``: why it was skipped or not run, or the error that ended it.
    """

    name: str
    state: LineState
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass(slots=True)
class CheckRecord:
    """``model``: the config.json of the measured model. ``bench``: a whole bench.json, if the line ran."""

    rehearsal: bool
    machine: dict[str, Any]
    model: dict[str, Any]
    seconds: float = 0.0
    lines: list[LineRecord] = field(default_factory=list)
    bench: dict[str, Any] | None = None

    @property
    def figures(self) -> dict[str, float]:
        """All figures of all lines."""
        return {name: value for line in self.lines for name, value in line.figures.items()}

    def of_state(self, state: LineState) -> list[LineRecord]:
        return [line for line in self.lines if line.state == state]

    def write(self, path: Path) -> None:
        plain = {"kind": "gpu-check", "schema": CHECK_SCHEMA, **asdict(self), "figures": self.figures}
        write_text(path, json.dumps(without_nan(plain), indent=1) + "\n")
