"""What a supervised actor must provide: an answer to whether it is well, and how far its start is."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

from ray.exceptions import RayError

from actors.lifecycle.calls import PARALLEL
from grpo_dist.runtime.stacks import listen

_PORTABLE = "_raises_portable_errors"


@dataclass(frozen=True, slots=True)
class Health:
    """``work``: a number that changes while work makes progress; None: there is no work. ``phases``: those of
    the actor's start so far, with the seconds of each; while it starts, the last one is the current one.
    """

    work: float | None = None
    phases: tuple[tuple[str, float], ...] = ()


class Probeable:
    """A worker with a health check, with stack dumps for when it does not answer, and with named phases of
    its start. Exceptions of its public methods reach the driver: see `portable`.
    """

    _phases: list[tuple[str, float]]  # name, begin in seconds of `time.perf_counter`

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in dir(cls):
            method = inspect.getattr_static(cls, name)
            if not name.startswith("_") and inspect.isfunction(method) and not hasattr(method, _PORTABLE):
                setattr(cls, name, _make_errors_portable(method))

    def __new__(cls, *_: Any, **__: Any) -> Self:
        listen()  # before the constructor runs, which may hang, too
        worker = super().__new__(cls)
        worker._phases = []
        return worker

    def begin(self, phase: str, at: float | None = None) -> None:
        """Begin a phase of the start, which ends the one before; "": the start is done. ``at``: seconds of
        `time.perf_counter`; None: now.
        """
        self._phases.append((phase, time.perf_counter() if at is None else at))

    def rename(self, phase: str, name: str) -> None:
        """Rename a phase, of which more is known at its end."""
        self._phases = [(name if begun == phase else begun, at) for begun, at in self._phases]

    def phases(self) -> tuple[tuple[str, float], ...]:
        """Return the phases of the start so far, and the seconds of each."""
        phases = list(self._phases)
        ends = [*(at for _, at in phases[1:]), time.perf_counter()]
        return tuple((name, end - at) for (name, at), end in zip(phases, ends, strict=False) if name)

    def health(self) -> Health:
        """Return the worker's progress. Raises when it cannot continue."""
        return Health(phases=self.phases())


def portable(error: Exception) -> Exception:
    """Return ``error``, or its type and text where another process could not read it: that of a class which
    takes other arguments than it hands to its base. Ray would deliver an error without type or cause.
    """
    if isinstance(error, RayError):  # of an actor that this one called
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _make_errors_portable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method``, which raises only what `portable` returns."""

    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return method(*arguments, **keywords)
        except Exception as error:
            if (sent := portable(error)) is error:
                raise
            raise sent from error

    @wraps(method)
    async def wait(*arguments: Any, **keywords: Any) -> Any:
        try:
            return await method(*arguments, **keywords)
        except Exception as error:
            if (sent := portable(error)) is error:
                raise
            raise sent from error

    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        return method
    wrapped = wait if inspect.iscoroutinefunction(method) else call
    setattr(wrapped, _PORTABLE, True)
    return wrapped


def ask_in_parallel(worker: Any) -> Any:
    """Call `Probeable.health` of an actor made by `one_at_a_time`, in parallel to its work."""
    return worker.health.options(concurrency_group=PARALLEL).remote()


def ready(worker: Any) -> Any:
    return worker.ready.remote()
