"""What the actors of a run did during a step, read from all of them at once after its weight sync."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from actors.lifecycle.calls import LOST, PARALLEL, deadline_of
from actors.lifecycle.team import ElasticTeam, Team
from grpo_dist.runtime.concurrency import gather
from grpo_dist.runtime.metering import Usage, usage_metrics


class ActorUsage:
    """Reads and adds up the usage of all actors.

    ``teams``: those of each role. ``queueing``: roles of `calls.one_at_a_time`, whose queues hold work of
    later batches, so that they are asked in parallel to it. ``latest``: the result of the last `read`, by
    actor.
    """

    def __init__(
        self, teams: Mapping[str, Sequence[Team]], *, queueing: Collection[str], timeout_s: float
    ) -> None:
        self._teams, self._queueing, self._timeout_s = teams, queueing, timeout_s
        self.latest: dict[str, Usage] = {}

    async def read(self) -> dict[str, float]:
        """Return metrics of the work since the last call, and of how many actors were replaced."""
        named = {
            f"{role}-{i}": (role, actor)
            for role, serving in self._serving().items()
            for i, actor in enumerate(serving)
        }
        all_of_them = {name: actor for name, (_, actor) in named.items()}
        async with deadline_of(all_of_them, self._timeout_s, f"usage of {len(named)} actors"):
            usages = await gather(self._read_one(*who) for who in named.values())
        self.latest = {name: usage for name, usage in zip(named, usages, strict=True) if usage is not None}
        restarts = {
            f"restarts/{r}": sum(t.restarted() for t in teams) for r, teams in self._teams.items() if teams
        }
        elastic = [team for teams in self._teams.values() for team in teams if isinstance(team, ElasticTeam)]
        joined = elastic[0].metrics() if elastic else {}
        return usage_metrics(self.latest) | restarts | joined

    def states(self) -> dict[str, bool]:
        """Return for every actor by name whether it serves; False: it is being replaced."""
        return {
            f"{role}-{i}": serves
            for role, teams in self._teams.items()
            for i, serves in enumerate(state for team in teams for state in team.states())
            if serves is not None
        }

    def _serving(self) -> dict[str, list[Any]]:
        """Return the serving actors of each role; one that is being replaced answers only once it is
        ready.
        """
        return {role: [w for team in teams for w in team.alive()] for role, teams in self._teams.items()}

    async def _read_one(self, role: str, actor: Any) -> Usage | None:
        """Return the usage of one actor; None: it is lost, which its team notices by itself."""
        in_parallel = role in self._queueing
        ask = actor.usage.options(concurrency_group=PARALLEL) if in_parallel else actor.usage
        try:
            usage: Usage = await ask.remote()
        except LOST:
            return None
        return usage
