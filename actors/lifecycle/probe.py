"""What a supervised actor must provide: an answer to whether it is well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from actors.lifecycle.calls import PARALLEL
from grpo_dist.runtime.stacks import listen


@dataclass(frozen=True, slots=True)
class Health:
    """``work``: a number that changes while work makes progress; None: there is no work."""

    work: float | None = None


class Probeable:
    """A worker with a health check, and with stack dumps for when it does not answer."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        listen()  # before the constructor runs, which may hang, too
        return super().__new__(cls)

    def health(self) -> Health:
        """Return the worker's progress. Raises when it cannot continue."""
        return Health()


def ask_in_parallel(worker: Any) -> Any:
    """Call `Probeable.health` of an actor made by `one_at_a_time`, in parallel to its work."""
    return worker.health.options(concurrency_group=PARALLEL).remote()


def ready(worker: Any) -> Any:
    return worker.ready.remote()
