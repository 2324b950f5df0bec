"""The configuration of a target of `grpo-dist eval`.

    CONFIG.yaml      its model on its `data.eval`
    run directory    the exported model, with the settings of the run
    RUN@latest       the newest checkpoint of a run, with its settings; RUN@20: the checkpoint of step 20
    model            a directory, a hub id or `demo:tiny`, with the settings below

DATA replaces `data.eval`: a benchmark's name, or a path or hub id, read with the column names of the
configuration's or run's data. Prompt keys and the environment are those that all training sources have;
key=value overrides any setting.
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
from grpo_dist.config.data import PROMPT_KEYS
from grpo_dist.config.files import apply_overrides, checked, read_config, read_tree, set_key, validated
from grpo_dist.config.text import names_in
from grpo_dist.errors import UserError, expanded
from grpo_dist.runtime.model_files import is_checkpoint, split_reference
from grpo_dist.runtime.stage_log import print_line

# For a model without settings; the grader looks for a box first.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
_NEEDED = ("problem_template", "system_column", "history_column")  # name columns that other data may lack
_COLUMNS = (
    *_NEEDED, "problem_column", "answer_column", "answer_pattern", "multiple_answers", "columns",
)  # fmt: skip
_REPLACED = {"problem_column": "problem_template", "environment": "environment_kwargs"}  # by a given key
_ENVIRONMENT = ("environment", "environment_kwargs")
# Begin keys whose secrets an evaluation does not need: it does not read them.
_UNREAD = ("algorithm.", "data.order.", "data.train.", "demonstrations.", "sft.", "tracking.")
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
        tree = read_config(path)
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
        _set_data(tree, data, target, overrides)
    return validated(apply_overrides(tree, overrides, path), target, Config, unread=_UNREAD)


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
    set_key(tree, "model.adapter", None, model)  # the weights contain it
    return tree


def _set_data(tree: DictConfig, data: Sequence[str], where: str, overrides: Sequence[str]) -> None:
    """Replace `data.eval` by the sources ``data``, without the rewards that only replaced sets had."""
    columns, prompt = _column_settings(tree, where), _prompt_settings(tree, where)
    reads_others = set(names_in(prompt.get("template") or "")) - {"problem"}
    known = {key: value for key, value in prompt.items() if key != "template" or not reads_others}
    sources, lacking = [], []  # the second: numbers of sources that may lack columns
    for number, name in enumerate(data):
        source = _benchmark_source(name) if name in BENCHMARKS else {"path": name, "split": "test"}
        if name in BENCHMARKS or name.startswith("demo:"):
            source |= known
        else:
            source |= prompt | columns
            lacking.append(number)
        for key, other in _REPLACED.items():
            if any(override.startswith(f"data.eval.{number}.{key}=") for override in overrides):
                source.pop(other, None)
        sources.append(source)
    if lacking and (needs := [key for key in _NEEDED if key in columns]):
        print_line(
            f"note: {where}: DATA is read with {', '.join(f'`{key}`' for key in needs)} of the other data; "
            f"data.eval.{lacking[0]}.{needs[0]}=null reads it without"
        )
    by_source = OmegaConf.select(tree, "rewards.by_source", throw_on_resolution_failure=False)
    replaced = _labels(tree, "data.eval", where) if isinstance(by_source, DictConfig) else set()
    set_key(tree, "data.eval", sources, where)
    if replaced:
        for label in replaced - _labels(tree, "data.eval", where) - _labels(tree, "data.train", where):
            by_source.pop(label, None)
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
        for source in _sources(tree, key, where):
            if names := {n: source[n] for n in _COLUMNS if source.get(n)}:
                return names
    return {}


def _prompt_settings(tree: DictConfig, where: str) -> dict[str, Any]:
    """Return the prompt keys and the environment that all training sources set alike; name the others."""
    sources = _sources(tree, "data.train", where)
    shared: dict[str, Any] = {}
    differing: list[str] = []
    for keys in (*((key,) for key in PROMPT_KEYS), _ENVIRONMENT):
        settings = [{k: s[k] for k in keys if s.get(k) not in (None, {})} for s in sources]  # "" is a setting
        if all(one == settings[0] for one in settings):
            shared |= settings[0] if settings else {}
        else:
            differing += dict.fromkeys(key for one in settings for key in one)
    if differing:
        print_line(
            f"note: {where}: sources of `data.train` differ in {', '.join(differing)}, which the evaluation "
            f"takes from `data` instead; data.eval.0.{differing[0]}=... sets it"
        )
    return shared


def _labels(tree: DictConfig, key: str, where: str) -> set[str]:
    """Return the names of the sources at ``key``, by which `rewards.by_source` has their rewards."""
    return {checked(source, where, DataSourceConfig).label for source in _sources(tree, key, where)}


def _sources(tree: DictConfig, key: str, where: str) -> list[dict[str, Any]]:
    """Return the resolved sources at ``key``; []: there are none."""
    try:
        value = OmegaConf.select(tree, key)
        sources = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else []
    except OmegaConfBaseException as error:
        raise UserError(f"{where}: `{key}`: {error}".replace("\n", " ")) from error
    assert isinstance(sources, list)
    return [source for source in sources if isinstance(source, dict)]
