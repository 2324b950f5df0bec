"""The state of an episode's process, as its owner sees it."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from grpo_dist.environments.sandbox.failure import ProcessFailure


@dataclass(slots=True)
class LiveEpisode:
    """An episode with a process. ``lock``: one request at a time; ``ended`` is set once nothing is left."""

    number: int
    channel: socket.socket
    started: asyncio.Future[None]
    ended: asyncio.Future[None]
    failed: ProcessFailure | None = None  # of the machine: it was not started, or its zygote is lost
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_idle(self) -> bool:
        """Whether it has got its process, and no request is running."""
        return self.started.done() and not self.started.cancelled() and not self.lock.locked()

    def conclude(self, failed: ProcessFailure | None) -> None:
        """Notify all waiting callers that the process has ended."""
        self.failed = failed
        for future in (self.started, self.ended):
            if not future.done():
                future.set_result(None)
