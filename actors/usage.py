"""What the actors of a run did during a step, asked of all of them at once after its weight sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actors.calls import results
from grpo_dist.concurrency import deadline
from grpo_dist.usage import Usage, usage_metrics


class ActorUsage:
    """Driver-side handle. ``actors``: those of each role. ``latest``: by actor, as `read` last found it."""

    def __init__(self, actors: Mapping[str, Sequence[Any]], *, timeout_s: float) -> None:
        self._actors = {f"{role}-{i}": actor for role, own in actors.items() for i, actor in enumerate(own)}
        self._timeout_s = timeout_s
        self.latest: dict[str, Usage] = {}

    async def read(self) -> dict[str, float]:
        """Metrics of what was done since the last call."""
        async with deadline(self._timeout_s, f"usage of {len(self._actors)} actors"):
            found = await results(actor.usage.remote() for actor in self._actors.values())
        self.latest = dict(zip(self._actors, found, strict=True))
        return usage_metrics(self.latest)
