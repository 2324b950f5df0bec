"""The recorder of a loop that the caller writes, without a run directory: the caller keeps what it wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.runtime.recorder import LedgerEntry
from grpo_dist.runtime.stage_log import print_line
from grpo_dist.types import Group


class Notes:
    """Prints warnings, and keeps nothing."""

    directory = Path()

    def phase(self, name: str) -> None: ...
    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None: ...
    def spans(self, step: int, own: Sequence[Span], workers: Mapping[str, Usage]) -> None: ...
    def ledger(self, step: int, entry: LedgerEntry) -> None: ...
    def note(self, message: str) -> None: ...
    def flush(self) -> None: ...
    def back_to(self, step: int) -> None: ...

    def quarantine(self, step: int, groups: list[Group]) -> str:
        """Keep nothing: the caller has the batch."""
        return "the hands of the caller"

    def warn(self, message: str) -> None:
        print_line(message)
