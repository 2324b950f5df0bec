"""What `grpo-dist eval` is asked to evaluate, as a configuration.

    CONFIG.yaml      its model on its `data.eval`
    run directory    the model that the run exported, with the run's own settings
    model            a directory, a hub id, `demo:tiny`: with the settings below

DATA takes the place of `data.eval`, and is read by the columns of the configuration's or run's own data where
it has these; key=value sets whatever else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_dist.config import Config, DataSourceConfig
from grpo_dist.config.files import overridden, read_tree, set_key, validated
from grpo_dist.data.patterns import PatternSearch, PatternTimeout
from grpo_dist.data.readers import PATTERN_S, first_record
from grpo_dist.errors import UserError, refusals
from grpo_dist.tools.evaluate.benchmarks import BENCHMARKS, data_source

# Asked of a model that nothing else is known of: the grader looks for a box first.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_TEXTS = ("problem_column", "answer_column")
_COLUMNS = (*_TEXTS, "answer_pattern", "columns")
_MODEL: dict[str, Any] = {
    "data": {"instruction": INSTRUCTION, "max_prompt_tokens": 1024},
    "sampling": {"max_new_tokens": 2048},
}


def configuration(
    target: str, data: Sequence[str], overrides: Sequence[str], *, data_dir: Path | None = None
) -> Config:
    """Raises UserError for a target or data that cannot be what they are asked to be."""
    path = Path(target).expanduser()
    if path.suffix in (".yaml", ".yml"):
        tree = read_tree(path)
    elif _is_run(path):
        tree = _of_run(path)
    else:
        tree = OmegaConf.merge(OmegaConf.create(_MODEL), {"model": {"path": target}})  # type: ignore[assignment]
        if not data:
            raise UserError(
                f"{target}: no data to evaluate it on; name a benchmark ({', '.join(BENCHMARKS)}), a file or "
                f"a hub id behind it, e.g. grpo-dist eval {target} gsm8k"
            )
    if data:
        _set_data(tree, data, data_dir or _directory_of_environment(), target)
    for override in overrides:
        tree = overridden(tree, override, path)
    return validated(tree, target, Config)


def _directory_of_environment() -> Path | None:
    return Path(found) if (found := os.environ.get("GRPO_DATA")) else None


def _is_run(path: Path) -> bool:
    """Of `grpo-dist train`, or a stage of a pipeline."""
    known = ("config.yaml", "stage.json", "model")
    return path.is_dir() and not (path / "config.json").exists() and any((path / n).exists() for n in known)


def _of_run(path: Path) -> DictConfig:
    model = path / "model"
    if not (model / "config.json").is_file():
        raise UserError(
            f"{path}: a run directory without an exported model (no {model / 'config.json'}); let the run "
            "come to its end with checkpoint.export=true, or name a model directory"
        )
    own = path / "config.yaml"
    tree = read_tree(own) if own.is_file() else OmegaConf.create(_MODEL)
    set_key(tree, "model.path", str(model), str(path))
    set_key(tree, "model.revision", None, str(path))
    return tree


def _set_data(tree: DictConfig, data: Sequence[str], data_dir: Path | None, where: str) -> None:
    with refusals():
        sources = [data_source(name, data_dir) for name in data]
    known = _known_columns(tree, where)
    sources = [
        source if name in BENCHMARKS else _with_columns(source, known)
        for name, source in zip(data, sources, strict=True)
    ]
    set_key(tree, "data.eval", sources, where)
    set_key(tree, "evaluation.max_prompts", None, where)  # a run's shorter look at other data
    if OmegaConf.select(tree, "data.train") is None:
        set_key(tree, "data.train", sources, where)  # a configuration has some; an evaluation reads none


def _finds(pattern: str, text: str) -> bool:
    """Whether ``pattern`` is in ``text``; True where it finds no end or cannot be read: reading the data says
    so.
    """
    try:
        with PatternSearch(pattern, timeout_s=PATTERN_S) as search:
            return search.search(text) is not None
    except (PatternTimeout, RuntimeError):
        return True


def _known_columns(tree: DictConfig, where: str) -> list[dict[str, Any]]:
    """How the data of a configuration or a run are read, those of its evaluations first."""
    known: list[dict[str, Any]] = []
    for key in ("data.eval", "data.train"):
        try:
            found = OmegaConf.select(tree, key)
            sources = OmegaConf.to_container(found, resolve=True) if isinstance(found, ListConfig) else []
        except OmegaConfBaseException as error:
            raise UserError(f"{where}: `{key}`: {error}".replace("\n", " ")) from error
        assert isinstance(sources, list)
        for source in sources:
            if isinstance(source, dict):
                known.append({name: source[name] for name in _COLUMNS if source.get(name)})
    return known


def _with_columns(source: dict[str, Any], known: list[dict[str, Any]]) -> dict[str, Any]:
    """``source`` read as the first of ``known`` data whose problem and answer its first row has, too. The
    answer pattern goes with it where it matches that row. What cannot be read stays as it is: reading it
    says why.
    """
    try:
        first = first_record(DataSourceConfig(**source))
    except ValueError:
        return source
    for own in known:
        columns = {name: own.get(name, DataSourceConfig.model_fields[name].default) for name in _TEXTS}
        if not all(column in first for column in columns.values()):
            continue
        pattern, answer = own.get("answer_pattern"), str(first[columns["answer_column"]])
        if pattern is not None and not _finds(str(pattern), answer):
            own = {name: value for name, value in own.items() if name != "answer_pattern"}
        return source | own
    return source
