"""The metric catalogue: every metric that a run can log, parsed from the last table of this folder's README.

A test finds metrics without an entry, and entries that nothing logs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_PLACEHOLDER = re.compile(r"<\w+>")


class Metric(NamedTuple):
    """A row of the table. ``reducer``: how the values of a step become one number. ``look_for``: the healthy
    range, or the meaning of a change. The last two are markdown.
    """

    name: str
    unit: str
    reducer: str
    meaning: str
    look_for: str


@lru_cache
def metrics() -> tuple[Metric, ...]:
    text = Path(__file__).with_name("README.md").read_text().partition("## Every metric")[2]
    rows = (map(str.strip, line.split("|")) for line in text.splitlines() if line.startswith("| `"))
    return tuple(Metric(name.strip("`"), *how.split(", ", 1), *words) for _, name, how, *words, _ in rows)


def described(name: str) -> Metric | None:
    """Return the entry of a logged metric: the most specific one that matches, or None.

    "reward/mean" -> entry reward/mean        "reward/brevity" -> entry reward/<name>
    """
    return next((metric for pattern, metric in patterns() if pattern.fullmatch(name)), None)


@lru_cache
def patterns() -> list[tuple[re.Pattern[str], Metric]]:
    """Return the patterns of whole names, most specific first: fewest placeholders, then most other text."""

    def vague(metric: Metric) -> tuple[int, int]:
        return len(_PLACEHOLDER.findall(metric.name)), -len(_PLACEHOLDER.sub("", metric.name))

    return [(_pattern(metric.name), metric) for metric in sorted(metrics(), key=vague)]


def _pattern(name: str) -> re.Pattern[str]:
    """Compile a name. A placeholder matches anything with slashes, such as a metric of the first update."""
    return re.compile(".+".join(map(re.escape, _PLACEHOLDER.split(name))))
