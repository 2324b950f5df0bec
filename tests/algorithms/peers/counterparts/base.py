"""What stands on this project's side of a recorded case."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A case whose numbers are not ours, on purpose.

    ``peers``: the peer's numbers, from our functions with the one change that ``reason`` names.
    ``ours``: our numbers, from the definition written out, or with the part left out that differs.
    """

    reason: str
    peers: Callable[[], dict[str, Any]]
    ours: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Counterpart:
    """``section``: of `algorithm` in our configuration. ``how``: further arguments of the computation."""

    section: dict = field(default_factory=dict)
    how: dict = field(default_factory=dict)
    differs: Difference | None = None
    tolerance: float | None = None  # relative; None: that of the case's type


@dataclass(frozen=True)
class NoCounterpart:
    """Our maths has nothing that computes it; ``reason`` says what it would take."""

    reason: str
