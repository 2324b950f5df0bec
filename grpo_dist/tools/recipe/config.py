"""Pipeline files: an ordered list of stages, each a configuration that may refer to earlier stages' results.

    name: r1
    stages:
      - {name: cold_start, kind: sft, config: ../demo.yaml}
      - name: reasoning
        kind: grpo
        config: ../demo.yaml
        overrides: {model.path: "${stage:cold_start}", steps: 40}
      - name: rejection
        kind: sample
        config: ../demo.yaml
        overrides: {model.path: "${stage:reasoning}", rejection.samples_per_prompt: 4}
      - name: second_sft
        kind: sft
        config: ../demo.yaml
        overrides: {sft.data: ["${stage:rejection}/sft.jsonl", {path: "demo:add3", examples: 500}]}

``${stage:NAME}`` is the model of an sft or grpo stage, or the directory of a sample stage. A stage's settings
come from its file, then the pipeline's `seed` (also as `sft.seed`), `settings` (nested), `overrides` (dotted
keys), and ``STAGE.key=value`` on the command line. Other interpolations belong to the stage's configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, model_validator

from grpo_dist.config import Config, Section
from grpo_dist.config.base import DirectoryName, Seed
from grpo_dist.config.files import (
    ConfigError,
    apply_overrides,
    checked,
    merge,
    parser_reason,
    read_config,
    read_tree,
    set_from_text,
    set_key,
    validated,
)
from grpo_dist.config.secrets import masked_setting
from grpo_dist.errors import expanded

Kind = Literal["sft", "grpo", "sample"]
REFERENCE = re.compile(r"\$\{\s*stage\s*:\s*([^}]*?)\s*\}")
_SCORING = "rewards.models"
_OWN = ("name", "output_dir", "seed")  # keys of a pipeline that the command line can set
_PLACES = {  # settings that the pipeline sets, with the reason
    "name": "the pipeline names the directory of a stage",
    "output_dir": "the stages of a pipeline share its `output_dir`",
    "checkpoint.resume": "a pipeline always resumes; use --from to redo a stage",
}


class StageFile(Section):
    """One stage as written in the file."""

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", description="letters, digits, _ and -")
    kind: Kind = Field(
        description="sft: supervised training; grpo: reinforcement; sample: rejection sampling"
    )
    config: str | None = Field(None, description="configuration file, relative to the pipeline's")
    settings: dict[str, Any] = Field({}, description="nested settings, merged over the file")
    overrides: dict[str, Any] = Field({}, description="dotted keys, e.g. {policy.optimizer.lr: 1.0e-5}")


class PipelineFile(Section):
    """A pipeline as written in the file."""

    name: DirectoryName = Field(
        "pipeline", description="name of the pipeline and of its directory in `output_dir`"
    )
    output_dir: str = Field("runs", description="parent of the pipeline's directory")
    seed: Seed | None = Field(
        None, description="seed of every stage and of its `sft` section; null: the seed in each configuration"
    )
    stages: tuple[StageFile, ...] = Field(min_length=1, description="the stages, in order")

    @model_validator(mode="after")
    def _names(self) -> PipelineFile:
        names = [stage.name for stage in self.stages]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"two stages are called `{name}`; give each its own name")
            if name in (*_OWN, "stages"):
                raise ValueError(f"a stage cannot be called `{name}`, a key of the pipeline; rename it")
        return self


@dataclass(frozen=True)
class ResolvedStage:
    """One stage with its complete configuration.

    ``symbolic``: ``config`` with ``stage:NAME`` instead of other stages' paths, so that it does not depend on
    the pipeline's directory.
    """

    name: str
    kind: Kind
    directory: Path
    config: Config
    symbolic: Config
    inputs: tuple[str, ...]  # names of referenced stages

    @property
    def start(self) -> str:
        """The model that the stage begins with: ``stage:NAME``, a path or a hub id."""
        sft = self.symbolic.sft
        return sft.model if self.kind == "sft" and sft else self.symbolic.model.path

    @property
    def result(self) -> Path:
        """The path that ``${stage:NAME}`` resolves to."""
        return self.directory if self.kind == "sample" else self.directory / "model"


@dataclass(frozen=True)
class ResolvedPipeline:
    name: str
    directory: Path
    stages: tuple[ResolvedStage, ...]

    def __getitem__(self, name: str) -> ResolvedStage:
        return next(stage for stage in self.stages if stage.name == name)


def load_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> ResolvedPipeline:
    """Read a pipeline file and all its configurations.

    Raises ConfigError for an invalid stage configuration, a reference to a stage that is not earlier, and a
    result of the wrong kind (a model as data, or data as a model).
    """
    path = Path(path)
    tree = read_tree(path)
    pipeline_keys = [text for text in overrides if text.partition("=")[0] in _OWN]
    for text in pipeline_keys:
        set_from_text(tree, text)
    return resolve(_read_file(tree, path), path, [text for text in overrides if text not in pipeline_keys])


def _read_file(tree: DictConfig, path: Path) -> PipelineFile:
    """Validate the file. Resolve interpolations in the pipeline's keys only, not in the stages' settings."""
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    for key in (key for key in _OWN if key in plain):
        try:
            plain[key] = tree[key]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: `{key}`: {parser_reason(error)}") from error
    return checked(plain, path, PipelineFile)


def resolve(file: PipelineFile, path: Path, overrides: Sequence[str] = ()) -> ResolvedPipeline:
    """Resolve a pipeline file's contents. Stages' configuration files are relative to ``path``."""
    directory = expanded(file.output_dir) / file.name
    by_stage = _group_by_stage(overrides, file)
    stages: list[ResolvedStage] = []
    for number, written in enumerate(file.stages, 1):
        where = f"{path}: stage `{written.name}`"
        tree = _tree(written, file.seed, path, by_stage[written.name], where)
        place = directory / f"{number:02d}_{written.name}"
        stages.append(_stage(written, tree, place, tuple(stages), file, where))
    return ResolvedPipeline(file.name, directory, tuple(stages))


def _group_by_stage(overrides: Sequence[str], file: PipelineFile) -> dict[str, list[str]]:
    """Group overrides by stage: ``rejection.model.path=x`` sets model.path=x in the stage `rejection`."""
    by_stage: dict[str, list[str]] = {stage.name: [] for stage in file.stages}
    for text in overrides:
        name, dot, rest = text.partition(".")
        if not dot or name not in by_stage:
            raise ConfigError(
                f"override {masked_setting(text)!r}: expected {', '.join(f'{k}=...' for k in _OWN)}, or "
                f"STAGE.key=value with one of the stages {', '.join(by_stage)}"
            )
        by_stage[name].append(rest)
    return by_stage


def _tree(
    written: StageFile, seed: int | None, path: Path, overrides: Sequence[str], where: str
) -> DictConfig:
    """Return a stage's configuration with unresolved references to other stages."""
    tree = read_config(path.parent / written.config) if written.config else OmegaConf.create({})
    for key in _PLACES:
        OmegaConf.update(tree, key, None)
    if seed is not None:
        tree["seed"] = seed
        changed = [*written.settings, *written.overrides, *overrides]
        if tree.get("sft") is not None or any(re.match(r"sft\b", key) for key in changed):
            OmegaConf.update(tree, "sft.seed", seed)
    if written.kind == "sft":  # starts from `sft.model`
        set_key(tree, "model.path", "sft", where)
        set_key(tree, "model.revision", None, where)
    try:
        merged = merge(tree, OmegaConf.create(dict(written.settings)))
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: settings: {parser_reason(error)}") from error
    for key, value in written.overrides.items():
        set_key(merged, key, value, f"{where}: overrides `{key}`")
    merged = apply_overrides(merged, overrides, path)
    for key, reason in _PLACES.items():
        if (value := OmegaConf.select(merged, key)) is not None:
            raise ConfigError(f"{where}: `{key}` = {value!r}: {reason}; remove the key")
    return merged


def _stage(
    written: StageFile,
    tree: DictConfig,
    directory: Path,
    earlier: tuple[ResolvedStage, ...],
    file: PipelineFile,
    where: str,
) -> ResolvedStage:
    plain = OmegaConf.to_container(tree, resolve=False)
    for text in _strings(plain):
        if text.startswith("stage:"):
            meant, slash, rest = text.removeprefix("stage:").partition("/")
            raise ConfigError(
                f"{where}: {text!r} is not a reference to a stage; write ${{stage:{meant}}}{slash}{rest}"
            )
    inputs = tuple(dict.fromkeys(name for text in _strings(plain) for name in REFERENCE.findall(text)))
    results = {stage.name: stage for stage in earlier}
    for name in inputs:
        _check_reference(name, written.name, list(results), [s.name for s in file.stages], where)

    def build(stands_for: Callable[[str], str]) -> Config:
        replaced = _map_strings(plain, lambda text: REFERENCE.sub(lambda m: stands_for(m[1]), text))
        replaced |= {"name": directory.name, "output_dir": str(directory.parent)}
        replaced["checkpoint"] = {**(replaced.get("checkpoint") or {}), "resume": "auto"}
        return validated(OmegaConf.create(replaced), where, Config)

    config = build(lambda name: str(results[name].result))
    symbolic = build(lambda name: f"stage:{name}")
    _check_kind(written.kind, config, where)
    for key, value, model in symbolic.input_paths():
        _check_use(key, value, model, results, where)
    stage = ResolvedStage(written.name, written.kind, directory, config, symbolic, inputs)
    _check_adapter(stage, results, where)
    return stage


def _check_reference(name: str, of: str, earlier: list[str], allowed: list[str], where: str) -> None:
    if name in earlier:
        return
    if name == of:
        raise ConfigError(f"{where} refers to itself: ${{stage:{name}}}; name an earlier stage")
    if name in allowed:
        raise ConfigError(
            f"{where} refers to ${{stage:{name}}}, which comes after it; move `{name}` before `{of}`"
        )
    raise ConfigError(
        f"{where} refers to ${{stage:{name}}}, but there is no such stage; earlier ones: "
        f"{', '.join(earlier) or 'none'}"
    )


def _check_kind(kind: Kind, config: Config, where: str) -> None:
    if kind == "sft" and config.sft is None:
        raise ConfigError(f"{where}: an sft stage needs an `sft` section; add one, as in configs/demo.yaml")
    if kind == "sft" and config.model.path != "sft":
        raise ConfigError(
            f"{where}: `model.path` = {config.model.path}: an sft stage starts from `sft.model`; set that"
        )
    if kind == "grpo" and config.epochs is not None:
        raise ConfigError(
            f"{where}: `epochs` = {config.epochs:g}: a pipeline is checked before its data exists; set "
            "`steps` instead"
        )
    if kind == "sample" and config.rewards.shuffle:
        raise ConfigError(
            f"{where}: `rewards.shuffle` = true: a control of training, and a sample stage does not train; "
            "remove it"
        )
    if kind != "sample" and not config.checkpoint.export:
        raise ConfigError(
            f"{where}: `checkpoint.export` = false: the result of {'an' if kind == 'sft' else 'a'} {kind} "
            "stage is its exported model; set it to true"
        )


def _check_use(key: str, value: str, model: bool, earlier: dict[str, ResolvedStage], where: str) -> None:
    """Check that model keys refer to models, and data keys to files of demonstrations."""
    if not value.startswith("stage:"):
        return
    name, slash, file = value.removeprefix("stage:").partition("/")
    makes_model = earlier[name].kind != "sample"
    if key.startswith(_SCORING):
        raise ConfigError(
            f"{where}: `{key}` = ${{stage:{name}}}{slash}{file}: a reward model is a classifier, which no "
            "stage trains; expected a directory or a hub id"
        )
    if model and (slash or not makes_model):
        raise ConfigError(
            f"{where}: `{key}` = ${{stage:{name}}}{slash}{file}: `{name}` is a {earlier[name].kind} stage; "
            "expected the model of an sft or grpo stage: ${stage:NAME} alone"
        )
    if not model and (makes_model or file != "sft.jsonl"):
        raise ConfigError(
            f"{where}: `{key}` = ${{stage:{name}}}{slash}{file}: expected ${{stage:NAME}}/sft.jsonl of a "
            f"sample stage; `{name}` is a {earlier[name].kind} stage"
        )


def _check_adapter(stage: ResolvedStage, earlier: dict[str, ResolvedStage], where: str) -> None:
    """Check that no stage that led to the model of ``stage`` began with its `model.adapter`."""
    adapter, start = stage.config.model.adapter, stage.start
    while adapter is not None and start.startswith("stage:"):
        before = earlier[start.removeprefix("stage:")]
        if before.config.model.adapter == adapter:
            raise ConfigError(
                f"{where}: `model.adapter` = {adapter}: `model.path` = ${{{stage.start}}} contains it, since "
                f"stage `{before.name}` began with it; set model.adapter to null in stage `{stage.name}`"
            )
        start = before.start


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_strings(inner, change) for inner in value]
    return value
