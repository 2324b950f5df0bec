"""An entry of the metric catalogue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. ``reducer``: how the values of a step become one number. ``look_for``: the healthy range, or
    the meaning of a change. Both are markdown.
    """

    name: str
    unit: str
    reducer: str
    meaning: str
    look_for: str
