"""Ending actors within a bounded time, whatever state they are in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

_CLOSE_S = 30.0  # an actor that has not closed by then, or never came up, is killed as it is


async def end(workers: Sequence[Any]) -> None:
    """Ask each worker to `close`, for half a minute at most, then kill it. Never raises for a worker's
    sake.
    """
    closing = asyncio.gather(*(_closed(worker) for worker in workers), return_exceptions=True)
    try:
        await asyncio.wait_for(closing, _CLOSE_S)
    except TimeoutError:
        pass  # killed all the same
    finally:
        for worker in workers:
            ray.kill(worker)


async def _closed(worker: Any) -> None:
    await worker.close.remote()
