"""A run as named, versioned pieces of data for the page.

    about  metrics/N  clock/N  spans/N  events/N        N: a part of the file
    rows/KEY/N  texts/KEY/N  tokens/KEY/N               KEY: a table of samples, e.g. samples/step_000012

The manifest lists them. A page in a file holds all pieces; a served page fetches those with a new version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import pyarrow as pa

from grpo_dist.tools.report import episodes, line_files, rollouts, tokens
from grpo_dist.tools.report.line_files import LineFile, packed
from grpo_dist.tools.report.rollouts import AnswerReader, cut, read_rows
from grpo_dist.tools.report.run_dir import (
    TRAINING,
    RunDir,
    SampleFile,
    about,
    is_evaluation,
    sample_files,
    settings,
)

_SPANS = 300_000  # kept newest spans of a timeline
_ROLLOUTS = 100_000  # kept newest rollouts of a run
_Cut = tuple[list[range], bool]  # see `rollouts.cut`


@dataclass(frozen=True, slots=True)
class ReportLimits:
    """Limits of a page.

    ``rollouts``: newest rollouts per run; None: at most 100,000, and in a file only the newest steps that fit
    into 20 MB. ``tokens``: tokens with values in a file.
    """

    rollouts: int | None = None
    tokens: int = 400_000


@dataclass(frozen=True, slots=True)
class SamplePart:
    """``rows`` of a table of samples, from 0. ``recorded``: it has per-token training values."""

    file: SampleFile
    number: int
    rows: range
    version: str
    recorded: bool

    @property
    def key(self) -> str:
        return f"{self.file.key}/{self.number}"

    def entry(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        return {"key": self.key, "step": self.file.step, "kind": self.file.kind, "rows": len(self.rows),
                "recorded": self.recorded, "version": self.version}  # fmt: skip


class Source:
    """The pieces of one run. Threads must hold ``lock`` to use it."""

    def __init__(self, run: RunDir, limits: ReportLimits, answers: AnswerReader) -> None:
        self.run, self._limits, self._answers = run, limits, answers
        self.lock = Lock()
        path = run.path
        self._metrics = LineFile(path / "metrics.jsonl", line_files.metrics)
        self._timeline = LineFile(path / "timeline.jsonl", line_files.timeline, most=_SPANS, per_part=50)
        self._events = LineFile(path / "events.jsonl", line_files.events)
        self._ledger = LineFile(path / "ledger.jsonl", line_files.ledger)
        self._cuts: dict[str, tuple[str, _Cut | str]] = {}  # file -> version, parts or error
        self._rows: dict[str, tuple[str, bytes]] = {}  # part -> version, piece
        self._texts, self.tokenizer = tokens.find_tokenizer(path, settings(path))
        self.parts: dict[str, SamplePart] = {}
        self._about: dict[str, Any] = {}

    def manifest(self) -> dict[str, Any]:
        """Read the current state of the directory."""
        if self._texts is None:  # a starting run may still download its model
            self._texts, self.tokenizer = tokens.find_tokenizer(self.run.path, settings(self.run.path))
        notices: list[str] = []
        files = {"metrics": self._metrics, "timeline": self._timeline, "events": self._events,
               "ledger": self._ledger}  # fmt: skip
        for name, file in files.items():
            file.look()
            if file.torn:
                notices.append(f"{name}.jsonl: {file.torn} unreadable line(s) left out")
        missing = [f"{name}.jsonl" for name, file in files.items() if not file.parts and name != "events"]
        if missing and not is_evaluation(self.run.path):
            notices.append(f"missing or empty: {', '.join(missing)}")
        if self._timeline.left_out:
            notices.append(f"timeline.jsonl: only the newest {_SPANS:,} spans are shown")
        left_out, unreadable = self._find_parts()
        own_state = about(self.run.path)
        notices += [*unreadable, *self.unread(), *own_state["notices"]]
        self._about = own_state | {
            "ledger": line_files.totals(part.payload for part in self._ledger.parts),
            "tokenizer": self.tokenizer,
            "left_out": left_out,
            "notices": notices,
        }
        return {
            "label": self.run.label,
            "path": str(self.run.path),
            "about": self._about,
            "metrics": [part.version for part in self._metrics.parts],
            "clock": [part.version for part in self._timeline.parts],
            "spans": [None if part.dropped else part.version for part in self._timeline.parts],
            "events": [part.version for part in self._events.parts],
            "samples": [part.entry() for part in self.parts.values()],
            "has_tokens": self._texts is not None,
        }

    def unread(self) -> list[str]:
        """Return a notice if some completions were not searched for an answer."""
        count = self._answers.not_searched
        return (
            [f"found: {count:,} completions without a box were not searched for an answer"] if count else []
        )

    def piece(self, name: str) -> bytes:
        """Return a piece as compressed JSON. Raises KeyError for a missing piece."""
        kind, _, key = name.partition("/")
        if kind in ("rows", "texts", "tokens"):
            return self._piece_of_samples(kind, self.parts[key])
        files = {"metrics": self._metrics, "clock": self._timeline, "spans": self._timeline,
               "events": self._events}  # fmt: skip
        if kind not in files or not key.isdecimal() or int(key) >= len(files[kind].parts):
            raise KeyError(name)
        payload = files[kind].parts[int(key)].payload
        part = payload[("clock", "spans").index(kind)] if files[kind] is self._timeline else payload
        if part is None:
            raise KeyError(name)
        return part

    def pieces_of(self, part: SamplePart) -> dict[str, bytes]:
        """Read the rows and texts of a part at once."""
        table = read_rows(part.file.path, part.rows)
        rows = packed(rollouts.rows(table, self._answers))
        return {"rows": rows, "texts": packed(self._shown_texts(table))}

    def _shown_texts(self, table: pa.Table) -> dict[str, Any]:
        is_decoded = self._texts is not None and tokens.fits(table, self._texts)
        return rollouts.texts(table, self._texts.split if is_decoded and self._texts else None)

    def select_with_values(self, most: int) -> list[SamplePart]:
        """Return parts in order of preference for values of ``most`` tokens: training batches first, then
        recorded values, then newest.
        """
        if self._texts is None or most <= 0:
            return []
        return sorted(
            self.parts.values(),
            key=lambda part: (part.file.kind == TRAINING, part.recorded, part.file.step, -part.number),
            reverse=True,
        )

    def values(self, part: SamplePart, left: int, most: int) -> tuple[bytes | None, int, bool]:
        """Return token values of the first whole groups with at most ``left`` tokens, the remaining tokens,
        and whether a group above ``most`` tokens stopped them.

        The values are None if no group fits. The remainder is 0 if the next group would fit into ``most``,
        the page's limit, because ``left`` is used up. Raises ValueError for another tokenizer.
        """
        assert self._texts is not None
        table = self._token_table(part)
        lengths = episodes.lengths_of(table)
        starts = [*rollouts.group_starts(table), len(table)]
        sums = [sum(length or 0 for length in lengths[:start]) for start in starts]
        fitting = max(i for i, total in enumerate(sums) if total <= left)
        is_used_up = any(total - sums[fitting] <= most for total in sums[fitting + 1 : fitting + 2])
        left = 0 if is_used_up else left - sums[fitting]
        ends_early = fitting < len(sums) - 1 and not is_used_up
        if fitting == 0:
            return None, left, ends_early
        return packed(tokens.values(table.slice(0, starts[fitting]), self._texts)), left, ends_early

    def _token_table(self, part: SamplePart) -> pa.Table:
        assert self._texts is not None
        table = read_rows(part.file.path, part.rows, tokens.COLUMNS)
        if not tokens.fits(table, self._texts):
            raise ValueError(f"the tokens of {part.key} do not match {self.tokenizer}")
        return table

    def _piece_of_samples(self, kind: str, part: SamplePart) -> bytes:
        if kind == "tokens":
            if self._texts is None:
                raise KeyError(kind)
            return packed(tokens.values(self._token_table(part), self._texts))
        if kind == "texts":
            return packed(self._shown_texts(read_rows(part.file.path, part.rows)))
        cached = self._rows.get(part.key)
        if cached is None or cached[0] != part.version:
            table = read_rows(part.file.path, part.rows)
            cached = self._rows[part.key] = part.version, packed(rollouts.rows(table, self._answers))
        return cached[1]

    def _find_parts(self) -> tuple[dict[str, int], list[str]]:
        """Keep the newest parts of all tables. Return the numbers of rollouts and tables left out, and the
        unreadable tables.
        """
        parts: list[SamplePart] = []
        unreadable: list[str] = []
        num_rows, left_out, tables = 0, 0, 0
        most = _ROLLOUTS if self._limits.rollouts is None else self._limits.rollouts
        for file in reversed(sample_files(self.run.path)):
            if num_rows >= most:
                tables += 1
                continue
            sample_parts = self._parts_of(file)
            if isinstance(sample_parts, str):
                unreadable.append(sample_parts)
                continue
            for part in reversed(sample_parts):
                if num_rows < most:
                    parts.append(part)
                    num_rows += len(part.rows)
                else:
                    left_out += len(part.rows)
        self.parts = {part.key: part for part in reversed(parts)}
        self._rows = {key: rows for key, rows in self._rows.items() if key in self.parts}
        return {"rollouts": left_out, "tables": tables}, unreadable

    def _parts_of(self, file: SampleFile) -> list[SamplePart] | str:
        """Return the parts of a table, or the reason why it cannot be read."""
        try:
            version = file.version
            cached = self._cuts.get(file.key)
            if cached is None or cached[0] != version:
                cached = self._cuts[file.key] = version, _cut_or_why_not(file)
        except FileNotFoundError:  # deleted in the meantime
            return []
        if isinstance(cached[1], str):
            return cached[1]
        parts, recorded = cached[1]
        return [SamplePart(file, i, rows, version, recorded) for i, rows in enumerate(parts)]


def sources(runs: Sequence[RunDir], limits: ReportLimits, answers: AnswerReader) -> list[Source]:
    return [Source(run, limits, answers) for run in runs]


def _cut_or_why_not(file: SampleFile) -> _Cut | str:
    try:
        return cut(file.path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"{file.key}.parquet: cannot be read ({reason})"
