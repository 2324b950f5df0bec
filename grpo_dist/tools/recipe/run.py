"""Runs a pipeline: skips complete stages, resumes interrupted ones, prints the table.

check everything  ->  for each stage: skip | resume | start  ->  table

Every stage resumes from the files in its directory:

sft      a run directory as from `grpo-dist train`; resumes from its newest checkpoint; with
         `evaluation.after` also evaluation.json and evaluations/
grpo     a run directory, which resumes in the same way
sample   samples/, sft.jsonl, report.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_dist.config import Config
from grpo_dist.config.differences import listed
from grpo_dist.errors import UserError, as_user_errors
from grpo_dist.runs.checkpoint import why_ended_early
from grpo_dist.runs.identity import drop_layout
from grpo_dist.runs.models import sft_model
from grpo_dist.runs.preemption import ended_by_sigterm
from grpo_dist.runs.run_directory import check_writable, finished_steps, set_template_date
from grpo_dist.runs.session import train
from grpo_dist.runs.start import supervised
from grpo_dist.runtime.files import alone, keep_backup, replace_nan, write_text
from grpo_dist.runtime.tables import make_table, wide_console
from grpo_dist.tools.evaluate.run import evaluate_model
from grpo_dist.tools.recipe.check import check_stages, evaluates
from grpo_dist.tools.recipe.config import Kind, ResolvedPipeline, ResolvedStage
from grpo_dist.tools.recipe.record import (
    FILE,
    StageRecord,
    begin,
    comparable,
    differences,
    read_record,
    write_record,
)
from grpo_dist.tools.recipe.rejection import SFT_FILE, run_sampling

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
    """Run all stages in order and return their records.

    Args:
        again_from: redo this stage and all later ones; their old directories are kept as backups.
        check_only: check everything and print the plan, but run nothing.

    Raises UserError before anything starts, for a complete stage with changed settings or inputs, or invalid
    settings of a remaining stage.
    """
    with as_user_errors():
        pipeline = _with_template_date(pipeline)
    redone = _redone(pipeline, again_from)
    if check_only:
        done = _checked(pipeline, redone)
        _print_plan(pipeline, done, redone, say)
        return done
    with as_user_errors():
        check_writable(pipeline.directory)
    if fresh := not pipeline.directory.exists():
        _checked(pipeline, redone)  # before the directory is created, so that an error leaves nothing behind
        with as_user_errors():
            pipeline.directory.mkdir(parents=True, exist_ok=True)
    with alone(pipeline.directory, "at this pipeline; wait for it, or choose another `name`"):
        with as_user_errors():  # reread under the lock: another process may have finished stages
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
            _check_result_exists(stage)
            done[stage.name] = record
    return done


def _run(stage: ResolvedStage, done: Done, say: Callable[[str], None]) -> StageRecord:
    """Start or resume one stage. Its time counts even if it fails."""
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
    """Return ``pipeline`` with its start date as the chat templates' date in all stages."""
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
    """Check that settings and inputs match the record.

    A started stage without files may change freely. A started sft or grpo stage may change what a resumed run
    may change; a started sample stage may change the settings that select among its samples.
    """
    if record.state == "started" and not _has_work(stage.directory):
        return
    old, new = (comparable(either, stage, record.state) for either in (record, now))
    if changed := differences(old, new, stage.symbolic):
        raise ValueError(
            f"stage `{stage.name}` is {record.state} ({stage.directory}) with other settings or inputs: "
            f"{listed(changed)}. Restore them, or redo it and all later stages with --from {stage.name}"
        )


def _check_result_exists(stage: ResolvedStage) -> None:
    wanted = [SFT_FILE] if stage.kind == "sample" else ["config.json", "*.safetensors"]
    gone = next((name for name in wanted if not any(stage.result.glob(name))), None)
    if gone:
        raise ValueError(
            f"stage `{stage.name}` is complete, but {stage.result / gone} is missing; put it back, or redo "
            f"the stage and all later ones with --from {stage.name}"
        )


def _has_work(directory: Path) -> bool:
    return any(path.name != FILE and not path.name.startswith(".") for path in directory.iterdir())


def _print_plan(
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
    """Yield a row per held-out set of a stage, with its first measure, usually pass@1.

    A stage's first row has its seconds and path.
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
    """Format a share: 0.5, 0.02 -> "50.0% ± 2.0%"; a missing share is "–"."""
    value, error = measures.get(key), measures.get(f"{key}_stderr")
    if value is None:
        return "–"
    return f"{value:.1%}" if error is None else f"{value:.1%} ± {error:.1%}"


# Stages

Measures = dict[str, float | None]  # by metric, e.g. eval/SET/pass@1; None: no estimate


@dataclass(frozen=True)
class StageResult:
    before: Measures = field(default_factory=dict)
    after: Measures = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


Run = Callable[[ResolvedStage, Measures, Callable[[str], None]], StageResult]


def run_sft_stage(stage: ResolvedStage, before: Measures, say: Callable[[str], None]) -> StageResult:
    """Train on the policy's ranks, and evaluate the result.

    ``before``: an earlier stage's evaluation of the initial model; if there is none, it runs here if
    `evaluation.before` is set.
    """
    settings = stage.config.sft
    assert settings is not None  # an sft stage has the section
    if finished_steps(stage.directory) is None:
        with as_user_errors():
            config, identity = supervised(stage.config, stage.symbolic)
        with ended_by_sigterm():
            train(config, identity=identity)
    if not evaluates(stage.config.data, stage.config.evaluation):
        return StageResult(before)
    if not before and stage.config.evaluation.before:
        with as_user_errors():
            base = sft_model(settings, stage.config.model.chat_template, say)
            before = evaluate_stage(stage.config, base, stage.directory, say)
    after = evaluate_stage(stage.config, stage.result, stage.directory, say)
    write_text(stage.directory / "evaluation.json", json.dumps({"before": before, "after": after}, indent=1))
    return StageResult(before, after)


def run_grpo_stage(stage: ResolvedStage, before: Measures, say: Callable[[str], None]) -> StageResult:
    """Train, and return the run's evaluations before its first and after its last step, if any."""
    is_whole = finished_steps(stage.directory) == stage.config.steps
    if not is_whole and not why_ended_early(stage.config, stage.directory):
        with ended_by_sigterm():
            train(stage.config, identity=stage.symbolic)
    lines = [json.loads(text) for text in (stage.directory / "metrics.jsonl").read_text().splitlines()]
    measured = [(line["step"], _measures(line)) for line in lines]
    first = next((metrics for step, metrics in measured if step == 0 and metrics), before)
    steps = finished_steps(stage.directory)  # fewer where `checkpoint.patience` or `target` ended the run
    last: Measures = next((metrics for step, metrics in measured if step == steps), {})
    return StageResult(first, last)


def run_sample_stage(stage: ResolvedStage, before: Measures, say: Callable[[str], None]) -> StageResult:
    return StageResult(counts=run_sampling(stage.config, stage.directory, say))


RUNS: dict[Kind, Run] = {"sft": run_sft_stage, "grpo": run_grpo_stage, "sample": run_sample_stage}


def known_measures(stage: ResolvedStage, earlier: dict[str, StageRecord]) -> Measures:
    """Return the evaluation of the initial model of ``stage`` by the stage that trained it.

    Empty unless that stage evaluated the same problems with the same settings.
    """
    start = stage.start
    made_by = earlier.get(start.removeprefix("stage:")) if start.startswith("stage:") else None
    if made_by is None or _protocol(made_by.settings) != _protocol(stage.symbolic.model_dump(mode="json")):
        return {}
    return made_by.after


def _protocol(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, except for the model, that affect an evaluation."""
    settings = drop_layout(settings)
    data = {key: value for key, value in settings["data"].items() if key not in ("train", "overlap")}
    when = ("every", "before", "after")
    evaluation = {key: value for key, value in settings["evaluation"].items() if key not in when}
    return {
        "seed": settings["seed"],
        "data": data,
        "evaluation": evaluation,
        "sampling": {key: settings["sampling"].get(key) for key in ("max_new_tokens", "stop")},
        "rewards": settings["rewards"],
        "environments": settings["environments"],
    }


def evaluate_stage(config: Config, model_dir: Path, directory: Path, say: Callable[[str], None]) -> Measures:
    """Evaluate a model. Stores the evaluation in ``directory``, so that a killed stage resumes it."""
    model = config.model.model_copy(update={"path": str(model_dir)})
    stage_config = config.model_copy(update={"model": model, "output_dir": str(directory)})
    return _measures(evaluate_model(stage_config, say).metrics())


def _measures(metrics: dict[str, Any]) -> Measures:
    """Select the metrics of an evaluation, with None for NaN, which JSON lacks."""
    measures: Measures = replace_nan(
        {key: value for key, value in metrics.items() if key.startswith("eval/")}
    )
    return measures
