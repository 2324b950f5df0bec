"""The metric catalogue: the meaning of each name, and the table of it in this folder's README.

``python -m grpo_dist.observe.catalogue`` rewrites the table; with ``--check`` its exit code shows whether the
table is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from grpo_dist.observe.metric_list import METRICS, Metric
from grpo_dist.runtime.files import refresh

README = Path(__file__).with_name("README.md")
_PLACEHOLDER = re.compile(r"<\w+>")


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

    return [(_pattern(metric.name), metric) for metric in sorted(METRICS, key=vague)]


def _pattern(name: str) -> re.Pattern[str]:
    """Compile a name. A placeholder matches anything with slashes, such as a metric of the first update."""
    return re.compile(".+".join(map(re.escape, _PLACEHOLDER.split(name))))


def table(metrics: Sequence[Metric] = METRICS) -> str:
    """Return the table as markdown."""
    heading = "| metric | unit, reducer | what it is | healthy, or what to look for |"
    rows = (f"| `{m.name}` | {m.unit}, {m.reducer} | {m.meaning} | {m.look_for} |" for m in metrics)
    return "\n".join([heading, "|---|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(refresh(README, "metrics", table(), arguments=sys.argv[1:]))
