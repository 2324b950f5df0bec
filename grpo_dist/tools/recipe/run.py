"""Run a pipeline: skip complete stages, resume interrupted ones, print the table.

check everything  ->  for each stage: skip | resume | start  ->  table
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from grpo_dist.config.differences import listed
from grpo_dist.errors import UserError, as_user_errors
from grpo_dist.runs.run_directory import check_writable, set_template_date
from grpo_dist.runtime.files import alone, keep_backup
from grpo_dist.runtime.tables import make_table, wide_console
from grpo_dist.tools.recipe.check import check_stages
from grpo_dist.tools.recipe.config import ResolvedPipeline, ResolvedStage
from grpo_dist.tools.recipe.record import (
    FILE,
    StageRecord,
    begin,
    differences,
    read_record,
    resumed_with,
    select_results,
    write_record,
)
from grpo_dist.tools.recipe.sampling import SFT_FILE
from grpo_dist.tools.recipe.stages import RUNS, known_measures

Done = dict[str, StageRecord]  # complete stages by name
_HEADINGS = ("stage", "kind", "measure", "before", "after", "seconds", "path")
_TEXTS = ("stage", "kind", "measure", "path")


def run_pipeline(
    pipeline: ResolvedPipeline,
    say: Callable[[str], None],
    *,
    again_from: str | None = None,
    check_only: bool = False,
) -> Done:
    """Run every stage in order, and return the records of all.

    Args:
        again_from: redo this stage and all later ones; their earlier directories are kept as backups.
        check_only: check everything and print the plan, but run nothing.

    Raises UserError, before anything starts, for a complete stage with changed settings or inputs, and for
    invalid settings of a remaining stage.
    """
    with as_user_errors():
        pipeline = _with_template_date(pipeline)
    redone = _redone(pipeline, again_from)
    if check_only:
        done = _checked(pipeline, redone)
        _say_plan(pipeline, done, redone, say)
        return done
    with as_user_errors():
        check_writable(pipeline.directory)
    if fresh := not pipeline.directory.exists():
        _checked(pipeline, redone)  # before the directory exists, so that an error leaves nothing behind
        with as_user_errors():
            pipeline.directory.mkdir(parents=True, exist_ok=True)
    with alone(pipeline.directory, "at this pipeline; wait for it, or choose another `name`"):
        with as_user_errors():  # read again under the lock: another process may have finished stages
            done = complete_stages(pipeline, redone)
        if not fresh:
            check_stages(pipeline, _list_unfinished(pipeline, done))
        for stage in redone:
            if stage.directory.exists():
                say(f"stage {stage.name}: moved the earlier directory to {keep_backup(stage.directory)}")
        for number, stage in enumerate(pipeline.stages, 1):
            heading = f"stage {number} of {len(pipeline.stages)}: {stage.name} ({stage.kind})"
            if stage.name in done:
                say(f"{heading}: already done")
                continue
            say(heading)
            done[stage.name] = _run(stage, done, say)
    print_table(pipeline, done)
    return done


def _checked(pipeline: ResolvedPipeline, redone: Sequence[ResolvedStage]) -> Done:
    """Return the complete stages after checking the others."""
    with as_user_errors():
        done = complete_stages(pipeline, redone)
    check_stages(pipeline, _list_unfinished(pipeline, done))
    return done


def _list_unfinished(pipeline: ResolvedPipeline, done: Done) -> list[str]:
    return [stage.name for stage in pipeline.stages if stage.name not in done]


def complete_stages(pipeline: ResolvedPipeline, redone: Sequence[ResolvedStage] = ()) -> Done:
    """Return the records of complete stages. Raises ValueError for changed settings or inputs."""
    done: Done = {}
    for stage in pipeline.stages:
        if stage in redone:
            continue
        record = read_record(stage.directory)
        if record is None:
            _check_free(stage)
            continue
        _check_same(stage, record, begin(stage, done))
        if record.state == "complete":
            _check_there(stage)
            done[stage.name] = record
    return done


def _run(stage: ResolvedStage, done: Done, say: Callable[[str], None]) -> StageRecord:
    """Start or resume one stage. Its time counts even when it fails."""
    record = begin(stage, done)
    earlier = read_record(stage.directory)
    spent = earlier.seconds if earlier else 0.0
    record = replace(record, seconds=spent)
    write_record(stage.directory, record)
    start = time.perf_counter()
    try:
        result = RUNS[stage.kind](stage, known_measures(stage, done), say)
    except BaseException:
        write_record(stage.directory, replace(record, seconds=spent + time.perf_counter() - start))
        raise
    seconds = spent + time.perf_counter() - start
    record = record.completed(seconds=seconds, before=result.before, after=result.after, counts=result.counts)
    write_record(stage.directory, record)
    return record


def _with_template_date(pipeline: ResolvedPipeline) -> ResolvedPipeline:
    """Return ``pipeline`` with the date that chat templates write in all its stages, that of its start."""
    records = (read_record(stage.directory) for stage in pipeline.stages)
    day = next((record.template_date for record in records if record and record.template_date), None)
    stages = (replace(stage, config=set_template_date(stage.config, day)) for stage in pipeline.stages)
    return replace(pipeline, stages=tuple(stages))


def _redone(pipeline: ResolvedPipeline, name: str | None) -> tuple[ResolvedStage, ...]:
    if name is None:
        return ()
    names = [stage.name for stage in pipeline.stages]
    if name not in names:
        raise UserError(f"--from {name}: no such stage; expected one of {', '.join(names)}")
    return pipeline.stages[names.index(name) :]


def _check_free(stage: ResolvedStage) -> None:
    if stage.directory.exists() and (not stage.directory.is_dir() or any(stage.directory.iterdir())):
        raise ValueError(
            f"stage `{stage.name}`: {stage.directory} exists, but is not of this pipeline (no {FILE}); "
            f"choose another `name` or `output_dir`, or use --from {stage.name}, which keeps it as a backup"
        )


def _check_same(stage: ResolvedStage, record: StageRecord, now: StageRecord) -> None:
    """Check that settings and inputs are those of the record.

    A started stage without any files may change freely. A started sft or grpo stage may change what a resumed
    run may change, and a started sample stage the settings that choose among its samples.
    """
    if record.state == "started":
        if not _has_work(stage.directory):
            return
        record, now = resumed_with(record, stage), resumed_with(now, stage)
    else:
        record, now = select_results(record, stage), select_results(now, stage)
    changed = differences(record, now, stage.symbolic)
    if changed:
        state = "complete" if record.state == "complete" else "started"
        raise ValueError(
            f"stage `{stage.name}` is {state} ({stage.directory}) with other settings or inputs: "
            f"{listed(changed)}. Restore them, or redo it and all later stages with --from {stage.name}"
        )


def _check_there(stage: ResolvedStage) -> None:
    wanted = [SFT_FILE] if stage.kind == "sample" else ["config.json", "*.safetensors"]
    gone = next((name for name in wanted if not any(stage.result.glob(name))), None)
    if gone:
        raise ValueError(
            f"stage `{stage.name}` is complete, but {stage.result / gone} is missing; put it back, or redo "
            f"the stage and all later ones with --from {stage.name}"
        )


def _has_work(directory: Path) -> bool:
    return any(path.name != FILE and not path.name.startswith(".") for path in directory.iterdir())


def _say_plan(
    pipeline: ResolvedPipeline, done: Done, redone: Sequence[ResolvedStage], say: Callable[[str], None]
) -> None:
    for stage in pipeline.stages:
        if stage.name in done:
            state = "done"
        elif stage in redone and stage.directory.exists():
            state = "to redo"
        else:
            state = "to resume" if (stage.directory / FILE).exists() else "to do"
        say(f"{stage.directory}  {stage.kind}  {state}")


def print_table(pipeline: ResolvedPipeline, records: Mapping[str, StageRecord]) -> None:
    title = f"pipeline {pipeline.name}"
    table = make_table(title, _HEADINGS, table_rows(pipeline, records), left=_TEXTS, wrap="never")
    wide_console().print(table)


def table_rows(pipeline: ResolvedPipeline, records: Mapping[str, StageRecord]) -> Iterator[tuple[str, ...]]:
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
    measures: dict[str, str] = {}  # set -> its first measure that has a standard error
    for key in [*record.after, *record.before]:
        if f"{key}_stderr" in record.after or f"{key}_stderr" in record.before:
            measures.setdefault(key.split("/")[1], key)
    return [
        (key.removeprefix("eval/").replace("/", " "), _share(record.before, key), _share(record.after, key))
        for key in measures.values()
    ]


def _share(measures: Mapping[str, float | None], key: str) -> str:
    """Format a share: 0.5, 0.02 -> "50.0% ± 2.0%"; a missing one is "–"."""
    value, error = measures.get(key), measures.get(f"{key}_stderr")
    if value is None:
        return "–"
    return f"{value:.1%}" if error is None else f"{value:.1%} ± {error:.1%}"
