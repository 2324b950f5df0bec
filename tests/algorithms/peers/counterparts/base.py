"""This project's side of a recorded case."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A case whose numbers are not ours, on purpose.

    ``peers``: computes the peer's numbers, with our functions and the one change that ``reason`` names.
    ``ours``: computes our numbers from the written-out definition, or without the part that differs.
    """

    reason: str
    peers: Callable[[], dict[str, Any]]
    ours: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Counterpart:
    """``section``: our `algorithm` section. ``how``: further arguments of the computation."""

    section: dict = field(default_factory=dict)
    how: dict = field(default_factory=dict)
    differs: Difference | None = None
    tolerance: float | None = None  # relative; None: the default of the case's type


@dataclass(frozen=True)
class NoCounterpart:
    """A case that our maths cannot compute; ``reason`` says what it would take."""

    reason: str
