"""Finds the files of a run directory, reading only names and small files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.config import Config, presets
from grpo_dist.config.differences import flat
from grpo_dist.config.secrets import masked
from grpo_dist.config.text import check_yaml, unescaped
from grpo_dist.errors import UserError, expanded, searched
from grpo_dist.runtime.files import parse_json

TRAINING, QUARANTINE = "training", "quarantine"
_CONFIG = "config.yaml"  # written by `grpo-dist train`
_EVALUATION = "evaluation.json"  # in the directory of `grpo-dist eval`
_SOURCES = ("data.train.", "data.eval.", "sft.data.")
_SAMPLES = re.compile(r"(?:eval_(?P<name>.+)_)?step_(?P<step>\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run in the report, from `grpo-dist train` or `grpo-dist eval`.

    Attributes:
        label: the path's shortest suffix that is unique in the report.
        path: run directory.
    """

    label: str
    path: Path


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A table of groups. ``kind``: training, quarantine, or an evaluation set's name. ``step``: 0 for samples
    of `grpo-dist eval`.
    """

    path: Path
    kind: str
    step: int

    @property
    def key(self) -> str:
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def version(self) -> str:
        """A version string that changes with the file. Raises OSError for a missing file."""
        status = self.path.stat()
        return f"{status.st_mtime_ns:x}-{status.st_size:x}"


def open_runs(paths: Sequence[str]) -> list[RunDir]:
    """Open the runs. Raises UserError for a path that is not a run directory or repeated."""
    directories = [expanded(path) for path in paths]
    for path in directories:
        if not path.is_dir():
            raise UserError(
                f"{path}: no such directory{searched(path)}; expected a run directory of grpo-dist train, "
                "e.g. runs/demo, or the directory of a grpo-dist eval"
            )
        if not any((path / name).is_file() for name in ("metrics.jsonl", _CONFIG, _EVALUATION)):
            raise UserError(
                f"{path}: not a run directory: it has neither metrics.jsonl, config.yaml nor {_EVALUATION}; "
                "expected a run directory of grpo-dist train, e.g. runs/demo, or the directory of a "
                "grpo-dist eval"
            )
    resolved = [path.resolve() for path in directories]
    if len(set(resolved)) < len(resolved):
        twice = next(path for path in resolved if resolved.count(path) > 1)
        raise UserError(f"{twice}: given twice; give each run once")
    return [RunDir(label, path) for label, path in zip(_labels(resolved), resolved, strict=True)]


def _labels(paths: list[Path]) -> list[str]:
    """Return the shortest distinct suffixes: /a/x/runs/demo, /a/y/runs/demo -> x/runs/demo, y/runs/demo."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-count:]).removeprefix("//") for path in paths]
        if len(set(labels)) == len(labels):
            break
    return labels


def is_evaluation(run: Path) -> bool:
    """Return whether the directory is from `grpo-dist eval`, which has samples but no steps.

    A pipeline's sft stage also has an evaluation.json, beside its config.yaml.
    """
    return (run / _EVALUATION).is_file() and not (run / _CONFIG).is_file()


def sample_files(run: Path) -> list[SampleFile]:
    """Return the tables ordered by step, with a step's training batch first."""
    if is_evaluation(run):
        files = [
            SampleFile(path, _kind(path.parent.name), 0) for path in run.glob("samples/*/part_*.parquet")
        ]
        return sorted(files, key=lambda file: file.key)
    files = [*_tables(run / "samples"), *_tables(run / QUARANTINE)]
    return sorted(files, key=lambda file: (file.step, file.kind != TRAINING, file.kind))


def _tables(directory: Path) -> Iterator[SampleFile]:
    for path in directory.glob("*.parquet"):
        if match := _SAMPLES.fullmatch(path.name):
            kind = QUARANTINE if directory.name == QUARANTINE else _kind(match["name"])
            yield SampleFile(path, kind, int(match["step"]))


def _kind(evaluation_set: str | None) -> str:
    """Return the kind of a table. Built-in kinds cannot be evaluation set names."""
    if evaluation_set is None:
        return TRAINING
    return f"eval {evaluation_set}" if evaluation_set in (TRAINING, QUARANTINE) else evaluation_set


def about(run: Path) -> dict[str, Any]:
    """Return settings, preset, environment and state; `notices` has unreadable files."""
    config, not_config = _settings(run)
    environment, not_environment = _mapping(run / "environment.json", parse_json)
    return {
        "config": dict(_flat(config)),
        "changed": _changed(dict(_flat(config))),
        "preset": presets.label(flat(config)),
        "environment": dict(_flat(environment)),
        "done": (run / "DONE").is_file(),
        "rows_dropped": _count_lines(run / "dropped.jsonl"),
        "notices": [notice for notice in (not_config, not_environment) if notice],
    }


def _changed(settings: Mapping[str, str]) -> list[str]:
    """Return the keys with non-default values. Lists of sources have defaults per entry; any other list is
    compared as a whole, and all its keys are returned if it differs.
    """
    defaults = _defaults()
    changed = {key for key, value in settings.items() if defaults.get(_default_key(key)) != value}
    lists = {name for key in changed if (name := _list_name(key))}
    return [key for key in settings if key in changed or _list_name(key) in lists]


@cache
def _defaults() -> dict[str, str]:
    """Return the default of each key that has one, formatted as by `_flat`."""
    source = [{"path": "demo:add3"}]
    required_keys = {
        "model": {"path": "demo:tiny"},
        "data": {"train": source, "eval": source},
        "sft": {"model": "demo:tiny", "data": source},
    }
    required = {"model.path", "data.train.0.path", "data.eval.0.path", "sft.model", "sft.data.0.path"}
    defaults = dict(_flat(Config.model_validate(required_keys).model_dump(mode="json")))
    return {key: value for key, value in defaults.items() if key not in required}


def _default_key(key: str) -> str:
    """Return the key in `_defaults`; sources use the first one: data.train.2.split -> data.train.0.split."""
    return re.sub(r"\.\d+(?=\.|$)", ".0", key) if key.startswith(_SOURCES) else key


def _list_name(key: str) -> str:
    """Return the list that contains ``key``: rewards.functions.0.kind -> rewards.functions; "" for none, or a
    list of sources.
    """
    match = None if key.startswith(_SOURCES) else re.match(r"(.+?)\.\d+(?=\.|$)", key)
    return match[1] if match else ""


def settings(run: Path) -> dict[str, Any]:
    """Return the directory's resolved configuration, {} if unreadable; for an evaluation, the settings that
    determine its samples.

    Not validated, because older versions may have other keys.
    """
    return _settings(run)[0]


def _settings(run: Path) -> tuple[dict[str, Any], str]:
    """Return the settings, and the reason if there are none."""
    if is_evaluation(run):
        recorded, why = _mapping(run / _EVALUATION, parse_json)
        sampled = recorded.get("settings")
        model = {"model": {"path": str(recorded.get("model", ""))}}
        return ({**sampled, **model} if isinstance(sampled, dict) else model), why
    if not (run / _CONFIG).is_file():
        return {}, "config.yaml is missing: no settings to show"
    return _mapping(run / _CONFIG, _yaml)


def _yaml(text: str) -> Any:
    check_yaml(text)
    return unescaped(yaml.safe_load(text))


def _mapping(path: Path, parse: Callable[[str], Any]) -> tuple[dict[str, Any], str]:
    """Return the mapping in a file, {} if there is none, and the reason if it cannot be read."""
    if not path.is_file():
        return {}, ""
    try:
        value = parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return {}, f"{path.name}: cannot be read ({reason})"
    return masked(value) if isinstance(value, dict) else {}, ""


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten to dotted keys: {"a": {"b": {"c": 1}}} -> a.b.c: 1. Lists of plain values stay on one line."""
    if isinstance(value, list) and all(not isinstance(inner, dict | list) for inner in value):
        value = ", ".join(map(_word, value)) if value else "[]"
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, _word(value)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)
