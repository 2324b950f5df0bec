"""The work of each kind of stage. Every stage resumes from the files in its directory.

sft      a run directory as of `grpo-dist train`; resumes from its newest checkpoint; with `evaluation.after`
         also evaluation.json and evaluations/
grpo     a run directory, which resumes likewise
sample   samples/, sft.jsonl, report.json
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_dist.config import Config
from grpo_dist.errors import as_user_errors
from grpo_dist.runs.identity import drop_layout
from grpo_dist.runs.models import sft_model
from grpo_dist.runs.preemption import ended_by_sigterm
from grpo_dist.runs.run_directory import finished_steps
from grpo_dist.runs.session import train
from grpo_dist.runs.start import supervised
from grpo_dist.runtime.files import replace_nan, write_text
from grpo_dist.tools.evaluate.run import evaluate_model
from grpo_dist.tools.recipe.check import evaluates
from grpo_dist.tools.recipe.config import Kind, ResolvedStage
from grpo_dist.tools.recipe.record import StageRecord
from grpo_dist.tools.recipe.sampling import run_sampling

Measures = dict[str, float | None]  # by metric, e.g. eval/SET/pass@1; None: no estimate


@dataclass(frozen=True)
class StageResult:
    before: Measures = field(default_factory=dict)
    after: Measures = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


Run = Callable[[ResolvedStage, Measures, Callable[[str], None]], StageResult]


def run_sft_stage(stage: ResolvedStage, before: Measures, say: Callable[[str], None]) -> StageResult:
    """Train on the policy's ranks, and evaluate the result.

    ``before``: the evaluation of the initial model if an earlier stage has it; otherwise it is made here when
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
    """Train, and return the run's evaluations before its first and after its last step, if it made them."""
    if finished_steps(stage.directory) != stage.config.steps:
        with ended_by_sigterm():
            train(stage.config, identity=stage.symbolic)
    lines = [json.loads(text) for text in (stage.directory / "metrics.jsonl").read_text().splitlines()]
    measured = [(line["step"], _measures(line)) for line in lines]
    first = next((metrics for step, metrics in measured if step == 0 and metrics), before)
    last: Measures = next((metrics for step, metrics in measured if step == stage.config.steps), {})
    return StageResult(first, last)


def run_sample_stage(stage: ResolvedStage, before: Measures, say: Callable[[str], None]) -> StageResult:
    return StageResult(counts=run_sampling(stage.config, stage.directory, say))


RUNS: dict[Kind, Run] = {"sft": run_sft_stage, "grpo": run_grpo_stage, "sample": run_sample_stage}


def known_measures(stage: ResolvedStage, earlier: dict[str, StageRecord]) -> Measures:
    """Return the evaluation of the initial model of ``stage`` by the stage that trained it.

    Empty unless that stage evaluated on the same problems with the same settings.
    """
    symbolic = stage.symbolic
    start = symbolic.sft.model if stage.kind == "sft" and symbolic.sft else symbolic.model.path
    made_by = earlier.get(start.removeprefix("stage:")) if start.startswith("stage:") else None
    if made_by is None or _protocol(made_by.settings) != _protocol(symbolic.model_dump(mode="json")):
        return {}
    return made_by.after


def _protocol(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, apart from the model, that affect an evaluation."""
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
        "environments": settings.get("environments"),  # an older record may lack it: then evaluate again
    }


def evaluate_stage(config: Config, model_dir: Path, directory: Path, say: Callable[[str], None]) -> Measures:
    """Evaluate a model. The evaluation is kept in ``directory``, so that a killed stage resumes it."""
    model = config.model.model_copy(update={"path": str(model_dir)})
    stage_config = config.model_copy(update={"model": model, "output_dir": str(directory)})
    return _measures(evaluate_model(stage_config, say).metrics())


def _measures(metrics: dict[str, Any]) -> Measures:
    """Select the metrics of an evaluation, with None for NaN, which JSON lacks."""
    measures: Measures = replace_nan(
        {key: value for key, value in metrics.items() if key.startswith("eval/")}
    )
    return measures
