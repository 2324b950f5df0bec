"""The interface by which the loop reports a run: `observe.Tracker` in production, fakes in tests."""

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
    """The loop's reporting interface. This base class records nothing."""

    directory = Path()  # the run directory

    def phase(self, name: str) -> None:
        """Note that the loop enters phase ``name``; `end`: its last checkpoint is written."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add ``metrics`` to the metrics of ``step``."""

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        """Write a table of samples, with per-token ``values`` if training computed them."""

    def spans(self, step: int, loop_spans: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """Write when the loop (``loop_spans``) and each worker were busy during ``step``."""

    def ledger(self, step: int, entry: LedgerEntry) -> None:
        """Write the outcome of every prompt of ``step``."""

    def quarantine(self, step: int, groups: list[Group]) -> str:
        """Save the batch of a failed step; return its path."""
        return "nowhere"

    def warn(self, message: str) -> None:
        """Report something that the user may have to act on."""

    def note(self, message: str) -> None:
        """Write an event that needs no action."""

    def flush(self) -> None:
        """Write everything to disk, before a checkpoint that relies on it."""

    def back_to(self, step: int) -> None:
        """Drop records of later steps: the run repeats them."""
