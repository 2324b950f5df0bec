"""Plans a pipeline: memory, hours and GPU-hours of every stage on one cluster, and of all.

    sft      policy ranks alone            memory of a rank; steps and validation losses
    grpo     as `plan` of a run            memory of all roles; steps, evaluations, checkpoints
    sample   engines, graders, reward models     memory of an engine; all prompts once

A stage that starts from the model of an earlier one has the sizes of the model this one derives from.
Where the rows of a source cannot be read, 10,000 are assumed. Left out: start and export of each stage, and
evaluations after sft and sample stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from grpo_dist.config import DataSourceConfig, SupervisedConfig
from grpo_dist.data.demonstrations import EXAMPLES, source_pairs
from grpo_dist.data.readers import count_rows, source_name
from grpo_dist.errors import UserError, expanded, refusals
from grpo_dist.runs.cold_start import base_model
from grpo_dist.runs.prepare import load_tokenizer
from grpo_dist.runtime.hardware import GIB
from grpo_dist.runtime.tables import make_table, print_lines
from grpo_dist.tools.plan.accelerators import ClusterShape, parse_cluster
from grpo_dist.tools.plan.assumptions import Assumptions
from grpo_dist.tools.plan.command import check_prompts, made_setting
from grpo_dist.tools.plan.evaluation import evaluation_s, first_epoch_steps
from grpo_dist.tools.plan.failures import NO_FAILURES
from grpo_dist.tools.plan.memory import Sizes
from grpo_dist.tools.plan.models import ModelShape, model_of
from grpo_dist.tools.plan.options import Setting, option_of, planned
from grpo_dist.tools.plan.peaks import Peaks
from grpo_dist.tools.plan.phases import RunLengths, phases_of
from grpo_dist.tools.plan.rates import Reached
from grpo_dist.tools.plan.roles import roles_of
from grpo_dist.tools.plan.supervised import supervised_problem, supervised_rank, supervised_times
from grpo_dist.tools.plan.whole_run import whole_run
from grpo_dist.tools.recipe.config import ResolvedPipeline, ResolvedStage, load_pipeline

_ROWS = 10_000  # assumed of a source whose rows cannot be read
_READ = 256  # rows of a source whose lengths count
_STEPS = 2  # simulated steps of a grpo stage

Settings = Mapping[str, Setting]  # of this stage and those before it, by name


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """``memory``: GiB of a GPU by role; ``seconds``: of the whole stage; ``assumed``: what is a guess."""

    name: str
    kind: str
    memory: Mapping[str, float]
    seconds: float
    words: str
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedPipeline:
    cluster: ClusterShape
    stages: tuple[PlannedStage, ...]

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


def plan_pipeline(
    pipeline: ResolvedPipeline,
    cluster: ClusterShape,
    *,
    bench: Path | None = None,
    prompt_tokens: int | None = None,
) -> PlannedPipeline:
    """Plan every stage of ``pipeline``. Raises UserError with the stages that do not fit, and why."""
    models: dict[str, ModelShape] = {}
    settings: dict[str, Setting] = {}
    assumed = Assumptions(bench=bench, prompt_tokens=prompt_tokens)
    found, problems = [], []
    for stage in pipeline.stages:
        try:
            model = _model(stage, models)
            models[stage.name] = model
            settings[stage.name] = made_setting(stage.config, cluster, assumed, model=model)
            if stage.kind != "sft":  # whose rows are demonstrations
                check_prompts(settings[stage.name], stage.config.data, assumed)
            found.append(_STAGES[stage.kind](stage, settings, pipeline))
        except (ValueError, OSError) as error:  # of its settings, or of its data
            problems.append(f"stage `{stage.name}`: {error}")
    if problems:
        raise UserError(f"{pipeline.name} on {cluster}: " + "\n  ".join(problems))
    return PlannedPipeline(cluster, tuple(found))


@dataclass(frozen=True)
class PipelineArguments:
    """The options of the command line for a pipeline."""

    cluster: str
    bench: str | None
    price: float | None
    prompt_tokens: int | None


def plan_file(path: str, overrides: Sequence[str], arguments: PipelineArguments) -> None:
    """Plan a pipeline file, and print the plan. Raises UserError for data that cannot be used, too."""
    with refusals():
        made = plan_pipeline(
            load_pipeline(path, overrides),
            parse_cluster(arguments.cluster, price=arguments.price),
            bench=Path(arguments.bench) if arguments.bench else None,
            prompt_tokens=arguments.prompt_tokens,
        )
    print_pipeline(made)


def print_pipeline(made: PlannedPipeline, console: Console | None = None) -> None:
    """Print a row for every stage, and what all take together."""
    console, cluster = console or Console(highlight=False), made.cluster
    where = "GiB of a GPU" if cluster.card else "GiB of the machine"
    table = make_table(
        f"stages on {cluster}",
        ("stage", "kind", where, "hours", "GPU-hours", ""),
        left=("stage", "kind", where, ""),
    )
    for stage in made.stages:
        memory = ", ".join(f"{role} {gib:.1f}" for role, gib in stage.memory.items())
        hours = stage.seconds / 3600
        table.add_row(
            stage.name, stage.kind, memory, f"{hours:,.2f}", f"{cluster.gpus * hours:,.1f}", stage.words
        )
    console.print(table)
    hours = made.seconds / 3600
    spent = f"{hours:,.2f} h, {cluster.gpus * hours:,.1f} GPU-hours"
    cost = f", ${cluster.price * hours:,.2f}" if cluster.price else ""
    notes = dict.fromkeys(note for stage in made.stages for note in stage.assumed)
    print_lines(
        console,
        [
            f"all stages: {spent}{cost}; left out: their starts and exports, and evaluations after sft and "
            "sample stages",
            *(f"assumed: {note}" for note in notes),
        ],
    )


def _model(stage: ResolvedStage, models: Mapping[str, ModelShape]) -> ModelShape:
    """Return the sizes of the model of a stage, which are those of the stage that it starts from."""
    symbolic = stage.symbolic
    start = symbolic.sft.model if stage.kind == "sft" and symbolic.sft else symbolic.model.path
    if not start.startswith("stage:"):
        return model_of(stage.config.model, stage.config.sft, stage.config.seed)
    earlier = start.removeprefix("stage:")
    if earlier not in models:
        raise UserError(f"the sizes of the model of stage `{earlier}` are unknown")
    return models[earlier]


def _sft(stage: ResolvedStage, settings: Settings, pipeline: ResolvedPipeline) -> PlannedStage:
    assert stage.config.sft is not None  # an sft stage has the section
    setting = settings[stage.name]
    config, cluster = SupervisedConfig.of(stage.config), setting.cluster
    gpu = cluster.card is not None
    roles = roles_of(
        config, setting.model, cluster, cpus=setting.calibration.cpus if setting.calibration else None
    )
    sizes = Sizes.of(config, gpu=gpu, memory=cluster.card.memory if cluster.card else 0)
    need = supervised_rank(config, setting.model, sizes)
    if problem := supervised_problem(config, need, cluster):
        raise UserError(problem)
    demonstrations, assumed = _demonstrations(stage, pipeline)
    rows = [*_rows_at_hand(stage), *_rows_to_come(stage, settings)]
    if not rows:
        assumed += ("demonstrations of half of `sft.max_length` on average",)
    times = supervised_times(
        config,
        setting.model,
        sizes,
        setting.calibration.peaks_of(roles) if setting.calibration else Peaks.of(cluster),
        setting.calibration.reached if setting.calibration else Reached(),
        rows=rows,
        demonstrations=demonstrations,
    )
    assert times.seconds is not None and times.steps is not None  # the demonstrations are counted
    return PlannedStage(
        stage.name,
        stage.kind,
        {"policy": need.total / GIB},
        times.seconds,
        f"{times.steps:,} steps of {times.step_s:.3g} s, {times.tokens / times.step_s:,.0f} tokens/s",
        assumed,
    )


def _grpo(stage: ResolvedStage, settings: Settings, pipeline: ResolvedPipeline) -> PlannedStage:
    setting, sampling = settings[stage.name], stage.config.sampling
    config = stage.config.model_copy(update={"sampling": sampling.at_its_longest})
    option = option_of(config, setting)
    if option.problems:
        raise UserError("; ".join(option.problems))
    made = planned(option, steps=_STEPS)
    unknown = first_epoch_steps(config.data, config.batch.prompts_per_step) or 0
    phases = phases_of(made, RunLengths(sampling, unknown))
    memory = {role: need.total / GIB for role, need in option.memory.items() if role in option.roles.workers}
    run = made.simulated
    words = f"{stage.config.steps:,} steps of {run.step_s:.3g} s, {run.tokens_per_s:,.0f} tokens/s"
    assumed = (setting.workload.assumed,) if setting.workload.assumed else ()
    return PlannedStage(stage.name, stage.kind, memory, whole_run(made, phases).seconds, words, assumed)


def _sample(stage: ResolvedStage, settings: Settings, pipeline: ResolvedPipeline) -> PlannedStage:
    """Plan engines that draw samples of all prompts once: an evaluation, with the lengths of this stage."""
    setting, rejection = settings[stage.name], stage.config.rejection
    sampled = stage.config.evaluation.model_copy(update={"samples_per_prompt": rejection.samples_per_prompt})
    config = stage.config.model_copy(update={"evaluation": sampled})
    option = option_of(config, setting, training=False)
    engine, scenario = option.engine, option.scenario
    if engine.longest < 1:
        raise UserError("; ".join(p for p in option.problems if p.startswith("rollout: ")))
    cap = rejection.max_new_tokens or config.sampling.longest
    workload = replace(setting.workload, cap=cap)
    prompts, assumed = _prompts(stage, pipeline)
    held = workload.prompt_tokens / rejection.samples_per_prompt + workload.mean
    own = replace(
        scenario,
        config=config,
        workload=workload,
        capacity=max(1, engine.sequences_of(held)),
        sharing=frozenset(),
        failures=NO_FAILURES,
    )
    chunk = min(prompts, rejection.chunk_prompts)  # its samples are saved before the next one starts
    seconds = evaluation_s(own, [chunk]) * prompts / chunk
    words = f"{prompts:,} prompts with {rejection.samples_per_prompt} samples each"
    return PlannedStage(stage.name, stage.kind, {"rollout": engine.total / GIB}, seconds, words, assumed)


def _prompts(stage: ResolvedStage, pipeline: ResolvedPipeline) -> tuple[int, tuple[str, ...]]:
    """Return the prompts of a sample stage, and what is assumed of their number."""
    most = stage.config.rejection.max_prompts
    known = [(s.path or source_name(s), _rows(s)) for s in stage.config.data.train]
    if most and any(rows is None for _, rows in known):
        return most, ()
    rows, assumed = _counted(known, "rows of data.train")
    return min(rows, most or rows), assumed


def _demonstrations(stage: ResolvedStage, pipeline: ResolvedPipeline) -> tuple[int, tuple[str, ...]]:
    """Return the demonstrations of an sft stage, and what is assumed of their number. A sample stage makes as
    many as it may keep.
    """
    assert stage.config.sft is not None and stage.symbolic.sft is not None
    known: list[tuple[str, int | None]] = []
    assumed: tuple[str, ...] = ()
    for source in stage.symbolic.sft.data:
        most = source.examples or stage.config.sft.examples
        if source.path.startswith("stage:"):
            maker = pipeline[source.path.removeprefix("stage:").partition("/")[0]]
            prompts, more = _prompts(maker, pipeline)
            assumed += (*more, f"stage `{maker.name}` keeps all that it may")
            rows: int | None = prompts * maker.config.rejection.keep_per_prompt
        elif source.path.startswith("demo:"):
            rows = most or EXAMPLES
        else:
            rows = _rows(DataSourceConfig(path=source.path))
        known.append((source.path, min(rows, most) if rows and most else rows or most))
    count, more = _counted(known, "demonstrations")
    return count, assumed + more


def _rows_at_hand(stage: ResolvedStage) -> list[tuple[int, int]]:
    """Return tokens of prompt and completion of some demonstrations, where files and model can be read."""
    sft, symbolic = stage.config.sft, stage.symbolic.sft
    assert sft is not None and symbolic is not None
    sources = [
        source.model_copy(update={"examples": min(source.examples or _READ, _READ)})
        for source in symbolic.data
        if not source.path.startswith("stage:") and _rows(DataSourceConfig(path=source.path))
    ]
    if not sources or symbolic.model.startswith("stage:"):
        return []
    try:
        tokenizer = load_tokenizer(base_model(sft, lambda _: None), False)
    except (ValueError, OSError):  # the model is not on this machine
        return []
    pairs = [pair for source in sources for pair in source_pairs(source, sft, tokenizer)]
    return [(len(pair.prompt), len(pair.completion)) for pair in pairs]


def _rows_to_come(stage: ResolvedStage, settings: Settings) -> list[tuple[int, int]]:
    """Return tokens of prompt and completion of rows that sample stages make."""
    assert stage.symbolic.sft is not None
    made = [source.path for source in stage.symbolic.sft.data if source.path.startswith("stage:")]
    workloads = [settings[path.removeprefix("stage:").partition("/")[0]].workload for path in made]
    return [(w.prompt_tokens, max(1, round(w.mean))) for w in workloads for _ in range(_READ)]


def _counted(known: Sequence[tuple[str, int | None]], what: str) -> tuple[int, tuple[str, ...]]:
    unknown = [path for path, rows in known if rows is None]
    notes = tuple(f"{_ROWS:,} {what} in {path}, which cannot be read" for path in unknown)
    return sum(_ROWS if rows is None else rows for _, rows in known), notes


def _rows(source: DataSourceConfig) -> int | None:
    """Return the rows of a local file or of a `demo:` set; else the source's bound, or None.

    Raises ValueError for what cannot be read.
    """
    if source.path is None:
        return source.max_rows
    if source.path.startswith("demo:") or expanded(source.path).exists():
        if not (count := count_rows(source)):
            raise ValueError(f"{source.path}: no rows; expected at least one")
        return count
    return source.max_rows


_STAGES = {"sft": _sft, "grpo": _grpo, "sample": _sample}
