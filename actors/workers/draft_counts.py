"""What an engine counts of drafts."""

from __future__ import annotations

from typing import NamedTuple


class DraftCounts(NamedTuple):
    """What an engine verified since the last reading: drafts of one sample each, their tokens, and those that
    were right.
    """

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*(a + b for a, b in zip(self, other, strict=True)))
