"""Counts the tokens whose keys and values an engine gives up for want of cache, and computes again later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Preemptions:
    """What the scheduler of one engine of vLLM takes back from sequences that run."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._known: dict[str, int] = {}  # preemptions of those that wait to be computed again

    def since(self) -> int:
        """Return the tokens of the sequences that were preempted since the last call."""
        before, self._known = self._known, self._waiting_again()
        return sum(
            own.num_tokens for own in self._preempted() if before.get(own.request_id) != own.num_preemptions
        )

    def disregard(self) -> None:
        """Do not count what has been preempted since the last call: a weight sync empties the cache."""
        self._known = self._waiting_again()

    def _waiting_again(self) -> dict[str, int]:
        return {own.request_id: own.num_preemptions for own in self._preempted()}

    def _preempted(self) -> Iterator[Request]:
        """Yield the sequences that wait to be computed again: vLLM puts them before all others."""
        for request in self._scheduler.waiting:
            if not request.num_preemptions:
                return
            yield request
