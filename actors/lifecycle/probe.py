"""What a supervised actor must provide: an answer to whether it is well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from actors.lifecycle.calls import BESIDE
from grpo_dist.runtime.stacks import listen


@dataclass(frozen=True, slots=True)
class Health:
    """``work``: a number that changes as long as the work in hand goes on; None: nothing is in hand."""

    work: float | None = None


class Probeable:
    """A worker that can be asked how it is, and looked at where it does not answer."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        listen()  # before anything that a constructor does: it may hang, too
        return super().__new__(cls)

    def health(self) -> Health:
        """Raises where it cannot go on."""
        return Health()


def ask_beside(worker: Any) -> Any:
    """`Probeable.health` of an actor class made by `one_at_a_time`."""
    return worker.health.options(concurrency_group=BESIDE).remote()


def ready(worker: Any) -> Any:
    return worker.ready.remote()
