"""Call a function in every worker process of a vLLM engine, so that an error keeps its type.

vLLM's executor of several processes raises at the first reply that is a failure. The replies of later ranks
stay queued, and the next call reads them as its own. Of the error only the text arrives. Here no call fails
for vLLM: the error is a part of the reply, and is raised once all replies are read.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from actors.lifecycle.probe import portable
from grpo_dist.errors import TransferLost

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Reply:
    """What one process returned, or raised. ``trace``: the traceback there, which pickling drops."""

    value: Any = None
    error: Exception | None = None
    trace: str = ""


def call_workers(engine: Any, function: Callable[[Any], T]) -> list[T]:
    """Call ``function`` with vLLM's worker in each process of ``engine``; return the results by rank.

    Raises the error of a process, with its type where it can be pickled. Of several errors it is the first
    that is not TransferLost: a process that fails takes the connections of the others with it.
    """
    replies: list[_Reply] = engine.collective_rpc(partial(_reply, function))
    errors = [(reply.error, reply.trace) for reply in replies if reply.error is not None]
    if errors:
        error, trace = next((e for e in errors if not isinstance(e[0], TransferLost)), errors[0])
        if error.__traceback__ is None:
            error.add_note(trace)
        raise error
    return [reply.value for reply in replies]


def _reply(function: Callable[[Any], Any], worker: Any) -> _Reply:
    try:
        return _Reply(function(worker))
    except Exception as error:
        return _Reply(error=portable(error), trace=traceback.format_exc())
