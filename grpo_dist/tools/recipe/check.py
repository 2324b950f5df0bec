"""Checks all stages of a pipeline before the first one starts.

An earlier stage's model is replaced by its base model, which has the same tokenizer, chat template and
maximum length. Only data that an earlier stage will write stay unchecked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

from grpo_dist.config import (
    Config,
    DataConfig,
    DataSourceConfig,
    DemonstrationsConfig,
    EvaluationConfig,
    SupervisedConfig,
)
from grpo_dist.config.engine_arguments import engine_problems
from grpo_dist.data.demonstrations import count_held_out, count_rows, load_source
from grpo_dist.data.readers import read_all
from grpo_dist.data.tasks import environment_problems
from grpo_dist.errors import UserError, as_user_errors, refuse
from grpo_dist.runs.models import load_tokenizer, resolve_model, sft_model
from grpo_dist.runs.prepare import check_rendering, check_scoring, prepare_eval, train_prompts
from grpo_dist.runs.run_directory import check_writable
from grpo_dist.runs.start import load_inputs
from grpo_dist.runs.start_checks import check_backend, check_length, model_problems, setting_problems
from grpo_dist.runtime import stage_log
from grpo_dist.runtime.hardware import DeviceType
from grpo_dist.tools.recipe.config import ResolvedPipeline, ResolvedStage


def check_stages(pipeline: ResolvedPipeline, todo: Collection[str]) -> None:
    """Check the stages ``todo``. Raises UserError, naming the stage, for the first problem."""
    with stage_log.stage("actors", "their code is loaded"):
        from actors.connection import fit

    with as_user_errors():
        check_writable(pipeline.directory)
    ancestors: dict[str, Path] = {}
    for stage in pipeline.stages:
        # Finished stages are included, because a later stage may derive from their models.
        what = "its model, data and settings" if stage.name in todo else "done before; its model"
        with _naming(stage), stage_log.stage(f"check of {stage.name}", what):
            ancestors[stage.name] = _ancestor(stage, ancestors)
            if stage.name not in todo:
                continue
            config = stage.config.model_copy(update=_without_stages(stage, ancestors))
            ranks = SupervisedConfig.from_config(config) if stage.kind == "sft" else None
            # The driver may be on a head without GPUs; the workers are not.
            has = fit(ranks or config, training=stage.kind != "sample")
            device: DeviceType = "cuda" if has.gpus else "cpu"
            if stage.kind != "sample":
                refuse(setting_problems(ranks or config, device))
            if ranks:
                refuse(model_problems(ranks, device, Path(config.model.path)))
                _check_rows_to_come(stage, pipeline)
                _check_demonstrations(stage, config)
                if evaluates(config.data, config.evaluation):
                    _check_sampling(config, device, config.data.eval, held_out=True)
                    fit(config, training=False)
            elif stage.kind == "grpo" and all(_exist_already(stage.symbolic.data.train)):
                load_inputs(config, _quiet, device=device)
            else:
                train = compress(config.data.train, _exist_already(stage.symbolic.data.train))
                _check_sampling(config, device, list(train), held_out=False)


@contextmanager
def _naming(stage: ResolvedStage) -> Iterator[None]:
    """Prefix errors in the block with the stage's name."""
    try:
        with as_user_errors():
            yield
    except UserError as error:
        raise UserError(f"stage `{stage.name}`: {error}") from error


def _quiet(message: str) -> None:
    """Drop messages about data and models; they are printed when the stage runs."""


def evaluates(data: DataConfig, evaluation: EvaluationConfig) -> bool:
    """Return whether the stage's result is evaluated on held-out problems."""
    return bool(evaluation.after and data.eval)


def _ancestor(stage: ResolvedStage, ancestors: dict[str, Path]) -> Path:
    """Return the existing model from which the stage's model derives."""
    if stage.start.startswith("stage:"):
        return ancestors[stage.start.removeprefix("stage:")]
    if stage.kind == "sft" and stage.config.sft:
        return sft_model(stage.config.sft, stage.config.model.chat_template, _quiet)
    config = stage.config
    return resolve_model(
        config.model, config.sft, config.seed, _quiet,
        train_first=False, trains_adapter=config.policy.lora is not None,
    )  # fmt: skip


def _without_stages(stage: ResolvedStage, ancestors: dict[str, Path]) -> dict[str, Any]:
    """Return the sections that name earlier stages, with the stages' base models in `model` and
    `distillation`, and `demonstrations` without their future files.
    """
    distillation, demonstrations = stage.config.distillation, stage.config.demonstrations
    models = [teacher.model for teacher in stage.symbolic.distillation.teachers]
    names = [model.removeprefix("stage:") if model.startswith("stage:") else "" for model in models]
    teachers = tuple(
        teacher.model_copy(update={"model": str(ancestors[name])}) if name else teacher
        for teacher, name in zip(distillation.teachers, names, strict=True)
    )
    if demonstrations is not None and stage.symbolic.demonstrations is not None:
        data = tuple(compress(demonstrations.data, _exist_already(stage.symbolic.demonstrations.data)))
        demonstrations = demonstrations.model_copy(update={"data": data}) if data else None
    return {
        "model": stage.config.model.model_copy(update={"path": str(ancestors[stage.name])}),
        "distillation": distillation.model_copy(update={"teachers": teachers}),
        "demonstrations": demonstrations,
    }


def _exist_already(sources: Sequence[DataSourceConfig] | Sequence[DemonstrationsConfig]) -> list[bool]:
    """Return for each data set whether it exists without running an earlier stage."""
    return [not (source.path or "").startswith("stage:") for source in sources]


def _check_demonstrations(stage: ResolvedStage, config: Config) -> None:
    assert config.sft is not None and stage.symbolic.sft is not None  # an sft stage has the section
    tokenizer = load_tokenizer(Path(config.model.path), config.model.trust_remote_code)
    there = _exist_already(stage.symbolic.sft.data)
    for source in compress(config.sft.data, there):
        # One generated demonstration suffices for the check.
        few = source.model_copy(update={"examples": 1}) if source.path.startswith("demo:") else source
        load_source(few, config.sft, tokenizer, day=config.data.day)
    if all(there):
        count_held_out(config.sft, count_rows(config.sft))


def _check_rows_to_come(stage: ResolvedStage, pipeline: ResolvedPipeline) -> None:
    """Check that no earlier stage writes longer rows than `sft.max_length`."""
    assert stage.symbolic.sft is not None  # an sft stage has the section
    longest = stage.symbolic.sft.max_length
    for source in stage.symbolic.sft.data:
        if not source.path.startswith("stage:"):
            continue
        maker = pipeline[source.path.removeprefix("stage:").partition("/")[0]]
        completion = maker.config.rejection.max_new_tokens or maker.config.sampling.longest
        row_length = maker.config.data.max_prompt_tokens + completion
        if row_length > longest:
            raise ValueError(
                f"sft.max_length = {longest}, but stage `{maker.name}` may make rows of {row_length} tokens "
                f"(data.max_prompt_tokens + the longest completion); raise sft.max_length to {row_length}, "
                f"or lower one of the two in that stage"
            )


def _check_sampling(
    config: Config, device: DeviceType, sources: Sequence[DataSourceConfig], *, held_out: bool
) -> None:
    """Check that samples of ``sources``, held out or for training, can be generated and scored."""
    check_scoring(config.rewards, config.sampling)
    check_backend(config.weight_sync, device)
    refuse(engine_problems(config.rollout, config.algorithm, device))
    check_length(config.model, Path(config.model.path), config.max_length)
    tokenizer = load_tokenizer(Path(config.model.path), config.model.trust_remote_code)
    check_rendering(config, tokenizer, _quiet)
    own = environment_problems(config.data, config.environments)
    rows = read_all(config.data.resolve_prompts(sources), own=own)
    if held_out:
        prepare_eval(config, rows, tokenizer, [], _quiet)
    else:
        train_prompts(config, rows, tokenizer, _quiet)
