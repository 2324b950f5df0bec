"""The closing table of a pipeline: accuracy on held-out problems before and after each stage, and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from grpo_dist.runtime.tables import make_table, wide_console
from grpo_dist.tools.recipe.config import ResolvedPipeline
from grpo_dist.tools.recipe.record import StageRecord

_HEADINGS = ("stage", "kind", "measure", "before", "after", "seconds", "path")
_TEXTS = ("stage", "kind", "measure", "path")


def print_table(pipeline: ResolvedPipeline, records: Mapping[str, StageRecord]) -> None:
    title = f"pipeline {pipeline.name}"
    table = make_table(title, _HEADINGS, rows(pipeline, records), left=_TEXTS, wrap="never")
    wide_console().print(table)


def rows(pipeline: ResolvedPipeline, records: Mapping[str, StageRecord]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each held-out set of a stage, with its first measure, usually pass@1.

    Seconds and path are in the first row of the stage.
    """
    for stage in pipeline.stages:
        record = records[stage.name]
        seconds, path = f"{record.seconds:,.0f}", str(stage.result)
        name, kind = stage.name, str(stage.kind)
        for measure, before, after in _measured(record) or [("–", "–", "–")]:
            yield name, kind, measure, before, after, seconds, path
            name = kind = seconds = path = ""


def _measured(record: StageRecord) -> list[tuple[str, str, str]]:
    if record.kind == "sample":
        kept = f"{record.counts['kept']} of {record.counts['samples']} samples kept"
        return [(kept, "–", "–")]
    found: dict[str, str] = {}  # set -> its first measure that has a standard error
    for key in [*record.after, *record.before]:
        if f"{key}_stderr" in record.after or f"{key}_stderr" in record.before:
            found.setdefault(key.split("/")[1], key)
    return [
        (key.removeprefix("eval/").replace("/", " "), _share(record.before, key), _share(record.after, key))
        for key in found.values()
    ]


def _share(measures: Mapping[str, float | None], key: str) -> str:
    """Format a share: 0.5, 0.02 -> "50.0% ± 2.0%"; a missing one is "–"."""
    value, error = measures.get(key), measures.get(f"{key}_stderr")
    if value is None:
        return "–"
    return f"{value:.1%}" if error is None else f"{value:.1%} ± {error:.1%}"
