"""The calls of one engine to one environment worker, few for many episodes.

Episodes that finish an action in the same step of the engine ask their environments at the same moment, and
end at the same moment. A call for each would keep the engine's process busier than the tools are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.workers.environment import Act, ActingEpisode
from grpo_dist.environments.records import Observed

_END_S = 0.05  # ends of episodes are collected for so long


class EnvironmentLine:
    """Used on one event loop. The loss of the worker is raised by every `act` of a call, an error of one
    action by its own `act` alone.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._acts: list[tuple[Act, asyncio.Future[Observed | None]]] = []
        self._begins: list[ActingEpisode] = []
        self._ends: list[str] = []
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, episode: ActingEpisode) -> None:
        """Announce that an episode will act, so that its process starts meanwhile. Does not wait."""
        if not self._begins:
            asyncio.get_running_loop().call_soon(self._send_begins)
        self._begins.append(episode)

    async def act(self, act: Act) -> Observed:
        """Give an action to its environment; return the answer."""
        loop = asyncio.get_running_loop()
        if not self._acts:
            loop.call_soon(self._send)  # behind the other episodes that act now
        answer: asyncio.Future[Observed | None] = loop.create_future()
        self._acts.append((act, answer))
        observed: Observed | None = await answer
        if observed is None:  # it takes its time, and was not alone
            observed = await self._worker.answer.remote(act.episode.name)
        return observed

    def end(self, episode: str) -> None:
        """End an episode soon. Does not wait."""
        if not self._ends:
            asyncio.get_running_loop().call_later(_END_S, self._send_ends)
        self._ends.append(episode)

    def _send_begins(self) -> None:
        begins, self._begins = self._begins, []
        self._worker.prepare.remote(begins)

    def _send_ends(self) -> None:
        ends, self._ends = self._ends, []
        self._worker.end.remote(ends)

    def _send(self) -> None:
        acts, self._acts = self._acts, []
        call = asyncio.create_task(self._exchange(acts), name=f"answers to {len(acts)} actions")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _exchange(self, acts: Sequence[tuple[Act, asyncio.Future[Observed | None]]]) -> None:
        try:
            observed = await self._worker.act.remote([act for act, _ in acts])
        except Exception as error:
            for _, answer in acts:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), own in zip(acts, observed, strict=True):
            if not answer.done():  # its episode may have been abandoned
                answer.set_result(own)
