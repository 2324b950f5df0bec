"""The configuration of a target of `grpo-dist eval`.

    CONFIG.yaml      its model on its `data.eval`
    run directory    the exported model, with the settings of the run
    model            a directory, a hub id or `demo:tiny`, with the settings below

DATA replaces `data.eval`. It is read with the column names of the configuration's or run's own data where it
has those columns; key=value overrides any setting.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_dist.config import Config, DataSourceConfig
from grpo_dist.config.files import read_tree, set_key, validated, with_overrides
from grpo_dist.data.readers import PATTERN_S, column, first_record, has_column
from grpo_dist.errors import UserError, expanded, refusals
from grpo_dist.runtime.patterns import PatternSearch, PatternTimeout
from grpo_dist.tools.evaluate.benchmarks import BENCHMARKS, data_source

# For a bare model; the grader looks for a box first.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_TEXTS = ("problem_column", "answer_column")
_COLUMNS = (*_TEXTS, "answer_pattern", "multiple_answers", "columns")
_MODEL: dict[str, Any] = {
    "data": {"instruction": INSTRUCTION, "max_prompt_tokens": 1024},
    "sampling": {"max_new_tokens": 2048},
}


def configuration(
    target: str, data: Sequence[str], overrides: Sequence[str], *, data_dir: Path | None = None
) -> Config:
    """Build the configuration that evaluates ``target`` on ``data``. Raises UserError for invalid ones."""
    path = expanded(target)
    if path.suffix in (".yaml", ".yml"):
        tree = read_tree(path)
    elif _is_run(path):
        tree = _of_run(path)
    else:
        tree = OmegaConf.merge(OmegaConf.create(_MODEL), {"model": {"path": target}})  # type: ignore[assignment]
        if not data:
            raise UserError(
                f"{target}: no data to evaluate it on; name a benchmark ({', '.join(BENCHMARKS)}), a file or "
                f"a hub id after it, e.g. grpo-dist eval {target} gsm8k"
            )
    if data:
        _set_data(tree, data, data_dir or _directory_of_environment(), target)
    return validated(with_overrides(tree, overrides, path), target, Config)


def _directory_of_environment() -> Path | None:
    return Path(found) if (found := os.environ.get("GRPO_DATA")) else None


def _is_run(path: Path) -> bool:
    """Return True for a directory of `grpo-dist train` or of a pipeline stage."""
    known = ("config.yaml", "stage.json", "model")
    return path.is_dir() and not (path / "config.json").exists() and any((path / n).exists() for n in known)


def _of_run(path: Path) -> DictConfig:
    model = path / "model"
    if not (model / "config.json").is_file():
        raise UserError(
            f"{path}: a run directory without an exported model (no {model / 'config.json'}); finish the "
            "run with checkpoint.export=true, or name a model directory"
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
    set_key(tree, "evaluation.max_prompts", None, where)  # the limit was meant for the run's own sets
    if OmegaConf.select(tree, "data.train") is None:
        set_key(tree, "data.train", sources, where)  # required by the schema; an evaluation does not read it


def _finds(pattern: str, text: str) -> bool:
    """Return True when ``text`` has ``pattern``, also for a bad pattern: reading the data reports that."""
    try:
        with PatternSearch(pattern, timeout_s=PATTERN_S) as search:
            return search.search(text) is not None
    except (PatternTimeout, RuntimeError):
        return True


def _known_columns(tree: DictConfig, where: str) -> list[dict[str, Any]]:
    """Return the column settings of the data of a configuration or run, evaluation sets first."""
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
    """Return ``source`` with the first of the ``known`` column settings that fits its first row.

    The answer pattern is kept only if it matches that row, further columns only if the row has them. An
    unreadable source is returned unchanged, and reading it later reports why.
    """
    try:
        first = first_record(DataSourceConfig(**source))
    except ValueError:
        return source
    for own in known:
        columns = {name: own.get(name, DataSourceConfig.model_fields[name].default) for name in _TEXTS}
        if not all(has_column(first, name) for name in columns.values()):
            continue
        pattern, answer = own.get("answer_pattern"), str(column(first, columns["answer_column"]))
        if pattern is not None and not _finds(str(pattern), answer):
            own = {name: value for name, value in own.items() if name != "answer_pattern"}
        further = [name for name in own.get("columns", ()) if has_column(first, name)]
        return source | own | ({"columns": further} if "columns" in own else {})
    return source
