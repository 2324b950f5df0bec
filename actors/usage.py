"""What the actors of a run did during a step, asked of all of them at once after its weight sync."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from actors.calls import BESIDE, results
from grpo_dist.concurrency import deadline
from grpo_dist.usage import Usage, usage_metrics


class ActorUsage:
    """Driver-side handle. ``actors``: those of each role. ``queueing``: roles of `calls.one_at_a_time`, which
    have work of later batches before them, and are asked beside it. ``latest``: by actor, as `read` last
    found it.
    """

    def __init__(
        self, actors: Mapping[str, Sequence[Any]], *, queueing: Collection[str], timeout_s: float
    ) -> None:
        self._ask = {
            f"{role}-{i}": actor.usage.options(concurrency_group=BESIDE) if role in queueing else actor.usage
            for role, own in actors.items()
            for i, actor in enumerate(own)
        }
        self._timeout_s = timeout_s
        self.latest: dict[str, Usage] = {}

    async def read(self) -> dict[str, float]:
        """Metrics of what was done since the last call."""
        async with deadline(self._timeout_s, f"usage of {len(self._ask)} actors"):
            found = await results(ask.remote() for ask in self._ask.values())
        self.latest = dict(zip(self._ask, found, strict=True))
        return usage_metrics(self.latest)
