"""The metric catalogue: what a name means, and the table of it in this folder's README.

``python -m grpo_dist.observe.catalogue`` writes the table anew; with ``--check`` it only says, by its exit
code, whether that is needed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from grpo_dist.observe.metric_list import METRICS, Metric
from grpo_dist.runtime.generated import refresh

README = Path(__file__).with_name("README.md")
_PLACEHOLDER = re.compile(r"<\w+>")


def described(name: str) -> Metric | None:
    """The entry of a metric as logged; of two that fit, the more exact one.

    "reward/mean" -> that of reward/mean        "reward/brevity" -> that of reward/<name>
    """
    return next((metric for pattern, metric in patterns() if pattern.fullmatch(name)), None)


@lru_cache
def patterns() -> list[tuple[re.Pattern[str], Metric]]:
    """Of whole names, the most exact ones first: few placeholders, then much text besides."""

    def vague(metric: Metric) -> tuple[int, int]:
        return len(_PLACEHOLDER.findall(metric.name)), -len(_PLACEHOLDER.sub("", metric.name))

    return [(_pattern(metric.name), metric) for metric in sorted(METRICS, key=vague)]


def _pattern(name: str) -> re.Pattern[str]:
    """A placeholder takes anything, slashes too: an evaluation set, or a metric of the first update."""
    return re.compile(".+".join(map(re.escape, _PLACEHOLDER.split(name))))


def table(metrics: Sequence[Metric] = METRICS) -> str:
    """As markdown."""
    heading = "| metric | unit | one number by | what it is | healthy, or what to look for |"
    rows = (f"| `{m.name}` | {m.unit} | {m.reducer} | {m.meaning} | {m.look_for} |" for m in metrics)
    return "\n".join([heading, "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(refresh(README, "metrics", table(), arguments=sys.argv[1:]))
