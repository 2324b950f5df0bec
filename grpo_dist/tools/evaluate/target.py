"""The configuration of a target of `grpo-dist eval`.

    CONFIG.yaml      its model on its `data.eval`
    run directory    the exported model, with the settings of the run
    RUN@latest       the newest checkpoint of a run, with its settings; RUN@20: the checkpoint of step 20
    model            a directory, a hub id or `demo:tiny`, with the settings below

DATA replaces `data.eval`: a benchmark's name, or a path or hub id, read with the column names of the
configuration's or run's data; key=value overrides any setting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_dist.config import Config, DataSourceConfig
from grpo_dist.config.files import apply_overrides, read_tree, set_key, validated
from grpo_dist.errors import UserError, expanded
from grpo_dist.runtime.model_files import is_checkpoint, split_reference

# For a model without settings; the grader looks for a box first.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_COLUMNS = ("problem_column", "answer_column", "answer_pattern", "multiple_answers", "columns")
_MODEL: dict[str, Any] = {
    "data": {"instruction": INSTRUCTION, "max_prompt_tokens": 1024},
    "sampling": {"max_new_tokens": 2048},
}


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark: its ``file`` with `problem` and `answer` in the directory `GRPO_DATA`, the keys of its
    `DataSourceConfig` on the hub, and the breakdown columns ``by``.
    """

    file: str
    hub: Mapping[str, Any]
    by: tuple[str, ...] = ()


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        "gsm8k_test.jsonl",
        {
            "path": "openai/gsm8k",
            "subset": "main",
            "split": "test",
            "problem_column": "question",
            "answer_pattern": r"####\s*(.+)",
        },
    ),
    "math500": Benchmark(
        "math500.jsonl", {"path": "HuggingFaceH4/MATH-500", "split": "test"}, by=("level", "subject")
    ),
    "aime24": Benchmark("aime24.jsonl", {"path": "HuggingFaceH4/aime_2024", "split": "train"}),
    "aime25": Benchmark("aime25.jsonl", {"path": "math-ai/aime25", "split": "test"}),
    "amc23": Benchmark(
        "amc23.jsonl", {"path": "math-ai/amc23", "split": "test", "problem_column": "question"}
    ),
}


def breakdown(source: DataSourceConfig) -> tuple[str, ...]:
    """Return the default breakdown columns for results on ``source``."""
    benchmark = BENCHMARKS.get(source.name or "")
    return tuple(dict.fromkeys(["source", "difficulty", "level", *(benchmark.by if benchmark else ())]))


def configuration(target: str, data: Sequence[str], overrides: Sequence[str]) -> Config:
    """Build the configuration that evaluates ``target`` on ``data``. Raises UserError for invalid input."""
    path = expanded(target)
    if path.suffix in (".yaml", ".yml"):
        tree = read_tree(path)
    elif is_checkpoint(target):
        tree = _run_settings(split_reference(target)[0], target)
    elif _is_run(path):
        tree = _run_settings(path, str(path / "model"))
    else:
        tree = OmegaConf.merge(OmegaConf.create(_MODEL), {"model": {"path": target}})  # type: ignore[assignment]
        if not data:
            raise UserError(
                f"{target}: no data to evaluate it on; name a benchmark ({', '.join(BENCHMARKS)}), a file or "
                f"a hub id after it, e.g. grpo-dist eval {target} gsm8k"
            )
    if data:
        _set_data(tree, data, target)
    return validated(apply_overrides(tree, overrides, path), target, Config)


def _is_run(path: Path) -> bool:
    """Return True for a directory of `grpo-dist train` or of a pipeline stage."""
    names = ("config.yaml", "stage.json", "model")
    return path.is_dir() and not (path / "config.json").exists() and any((path / n).exists() for n in names)


def _run_settings(run: Path, model: str) -> DictConfig:
    """Return the settings of a run with ``model``, the exported one or RUN@STEP, as its model."""
    settings = run / "config.yaml"
    if is_checkpoint(model) and not settings.is_file():
        raise UserError(f"{model}: no run in {run} (no config.yaml); expected RUN@latest or RUN@STEP")
    if not is_checkpoint(model) and not (run / "model/config.json").is_file():
        raise UserError(
            f"{run}: a run directory without an exported model (no {run}/model/config.json); name "
            f"{run}@latest or {run}@STEP for a checkpoint, or finish the run with checkpoint.export=true"
        )
    tree = read_tree(settings) if settings.is_file() else OmegaConf.create(_MODEL)
    set_key(tree, "model.path", model, model)
    set_key(tree, "model.revision", None, model)
    return tree


def _set_data(tree: DictConfig, data: Sequence[str], where: str) -> None:
    columns = _column_settings(tree, where)
    sources = [
        _benchmark_source(name)
        if name in BENCHMARKS
        else {"path": name, "split": "test"} | ({} if name.startswith("demo:") else columns)
        for name in data
    ]
    set_key(tree, "data.eval", sources, where)
    if OmegaConf.select(tree, "data.train") is None:
        set_key(tree, "data.train", sources, where)  # required by the schema; an evaluation does not read it


def _benchmark_source(name: str) -> dict[str, Any]:
    """Return the `DataSourceConfig` keys of a benchmark. Raises UserError if GRPO_DATA lacks it."""
    benchmark = BENCHMARKS[name]
    if not (directory := os.environ.get("GRPO_DATA")):
        return {"name": name, **benchmark.hub}
    path = expanded(directory) / benchmark.file
    if not path.is_file():
        raise UserError(
            f"{name}: no file {path}; expected {benchmark.file} with `problem` and `answer` in the directory "
            "GRPO_DATA; unset it to read the hub"
        )
    return {"name": name, "path": str(path)}


def _column_settings(tree: DictConfig, where: str) -> dict[str, Any]:
    """Return the first column settings in the data of a configuration or run, evaluation sets first."""
    for key in ("data.eval", "data.train"):
        try:
            value = OmegaConf.select(tree, key)
            sources = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else []
        except OmegaConfBaseException as error:
            raise UserError(f"{where}: `{key}`: {error}".replace("\n", " ")) from error
        assert isinstance(sources, list)
        for source in sources:
            if isinstance(source, dict) and (names := {n: source[n] for n in _COLUMNS if source.get(n)}):
                return names
    return {}
