"""What a call of a grader process gives, and what is known of a user's function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without a value; ``outcome`` is ``timeout`` or ``error``."""

    outcome: str
    detail: str


class Died(Failure):
    """The process died during the call."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a user function accepts. ``names``: its parameters, ``**anything`` among them by its name.
    ``required``: those without a default.
    """

    names: frozenset[str]
    required: frozenset[str] = frozenset()
    is_async: bool = False


def number_of(value: float | None) -> float:
    """Return what a process sends for a number; NaN for none."""
    return math.nan if value is None else float(value)


def result_of(status: str, value: Any) -> float | list[float] | Failure:
    """Return the number or numbers of one of several calls, or why it failed."""
    if status != "ok":
        return Failure("timeout" if status == "timeout" else "error", value)
    return [number_of(number) for number in value] if isinstance(value, list) else number_of(value)
