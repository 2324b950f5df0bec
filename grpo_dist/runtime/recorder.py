"""What the loop reports of a run: `observe.Tracker` in production, fakes in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_dist.batch.token_values import ValuesOfSamples
from grpo_dist.types import Group

if TYPE_CHECKING:  # imports torch, which `grpo-dist report` does not need
    from grpo_dist.runtime.metering import Span, Usage

# Prompt uids of one step by outcome, e.g. {"trained": ["gsm8k:12"]}; see `loop.ledger`.
LedgerEntry = Mapping[str, Sequence[str]]


class Recorder:
    """Every part of the loop writes to one of these. This one keeps nothing."""

    directory = Path()  # of the run

    def phase(self, name: str) -> None:
        """The loop enters the phase ``name``; `end` when it has ended and its last checkpoint is written."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add ``metrics`` to those of ``step``."""

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        """Write a table of samples, with per-token ``values`` where training computed them."""

    def spans(self, step: int, loop_spans: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """Write when the loop (``loop_spans``) and each worker were busy during ``step``."""

    def ledger(self, step: int, entry: LedgerEntry) -> None:
        """Write the outcome of every prompt of ``step``."""

    def quarantine(self, step: int, groups: list[Group]) -> str:
        """Keep the batch of a step that went wrong; return its path."""
        return "nowhere"

    def warn(self, message: str) -> None:
        """Report something that the user may have to act on."""

    def note(self, message: str) -> None:
        """Write an event that needs no action."""

    def flush(self) -> None:
        """Put everything on disk, before a checkpoint that counts on it."""

    def back_to(self, step: int) -> None:
        """Drop what was written of later steps: the run repeats them."""
