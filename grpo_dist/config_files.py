"""Configuration files: OmegaConf reads, merges and interpolates; the typed tree of `config.py` checks the
result.

A file may name others to build on, relative to itself; later ones win, then the file, then the command line:

    defaults: [base.yaml, algorithms/grpo.yaml]
    policy: {num_workers: 2}

On the command line ``+algorithm=dapo`` puts the preset configs/algorithms/dapo.yaml in place of the file's
`algorithm` section; what else the preset sets is merged.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from grpo_dist.config import Config
from grpo_dist.errors import UserError

_PRESETS = Path(__file__).resolve().parents[1] / "configs" / "algorithms"


class ConfigError(UserError):
    """A configuration that cannot be used; the message names key, value, requirement and remedy."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, its defaults and ``key=value`` overrides into the frozen tree.

    Raises ConfigError for a missing or malformed file, an unknown key, a bad value, or values that
    contradict.
    """
    merged = _read(Path(path), seen=())
    for override in overrides:
        is_preset = override.startswith("+")
        merged = _with_preset(merged, override, Path(path)) if is_preset else _apply(merged, override)
    try:
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {error}".replace("\n", " ")) from error
    try:
        return Config.model_validate(plain)
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from error


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, every default written out."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def _read(path: Path, seen: tuple[Path, ...]) -> DictConfig:
    resolved = path.resolve()
    if resolved in seen:
        raise ConfigError(
            f"{path}: `defaults` go round in a circle: {' -> '.join(p.name for p in (*seen, resolved))}"
        )
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file; pass a YAML file, e.g. configs/demo.yaml")
    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}".replace("\n", " ")) from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(loaded).__name__}")
    bases = loaded.pop("defaults", None) or []
    if isinstance(bases, str):
        bases = [bases]
    parts = [_read(path.parent / str(base), (*seen, resolved)) for base in bases]
    merged = OmegaConf.merge(*parts, loaded)
    assert isinstance(merged, DictConfig)
    return merged


def _with_preset(merged: DictConfig, override: str, path: Path) -> DictConfig:
    """``+algorithm=NAME``: the preset beside the configuration file, else the one of this project."""
    key, _, name = override.partition("=")
    directories = [path.parent / "algorithms", _PRESETS]
    known = {file.stem: file for directory in reversed(directories) for file in directory.glob("*.yaml")}
    if key != "+algorithm" or name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean +algorithm={near[0]}?" if near else ""
        raise ConfigError(
            f"override {override!r}: expected +algorithm=NAME with NAME one of "
            f"{', '.join(sorted(known))}{hint}"
            f"{', '.join(sorted(known))}{hint}"
        )
    preset = _read(known[name], seen=())
    rest = DictConfig({k: v for k, v in merged.items() if k != "algorithm"})
    result = OmegaConf.merge(rest, preset)
    assert isinstance(result, DictConfig)
    return result


def _apply(merged: DictConfig, override: str) -> DictConfig:
    """``a.b=1`` sets a value, ``a.0.b=1`` reaches into a list; YAML decides the type of the value."""
    key, sign, _ = override.partition("=")
    if not sign or not key:
        raise ConfigError(
            f"override {override!r}: expected key=value, e.g. steps=10 or policy.optimizer.lr=1e-5"
        )
    try:
        value = OmegaConf.from_dotlist([f"value={override[len(key) + 1 :]}"]).value
        OmegaConf.update(merged, key, value, merge=not isinstance(value, DictConfig) or len(value) > 0)
    except (YAMLError, OmegaConfBaseException, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"override {override!r}: {error}".replace("\n", " ")) from error
    return merged


def _explain(error: ValidationError, path: str | Path) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key `{where}`{_suggestion(item['loc'])}")
        elif item["type"] == "missing":
            lines.append(f"`{where}` is missing: {_description(item['loc']) or 'it has no default'}")
        elif item["type"] == "value_error":
            message = str(item["ctx"]["error"])
            lines.append(f"`{where}`: {message}" if where else message)
        else:
            lines.append(f"`{where}` = {item['input']!r}: {item['msg'].lower()}{_meaning(item['loc'])}")
    return f"{path}: " + "; ".join(lines)


def _suggestion(location: tuple[Any, ...]) -> str:
    section = _section(location[:-1])
    if section is None:
        return ""
    known = list(section.model_fields)
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean `{'.'.join(map(str, (*location[:-1], near[0])))}`?"
    elsewhere = [p for p in _all_keys(Config) if p.rsplit(".", 1)[-1] == location[-1]]
    return f"; did you mean `{elsewhere[0]}`?" if elsewhere else f"; known here: {', '.join(known)}"


def _meaning(location: tuple[Any, ...]) -> str:
    text = _description(location)
    return f" ({text})" if text else ""


def _description(location: tuple[Any, ...]) -> str | None:
    section = _section(location[:-1])
    if section is None or location[-1] not in section.model_fields:
        return None
    return section.model_fields[str(location[-1])].description


def _section(location: tuple[Any, ...]) -> type[BaseModel] | None:
    """The section class at a location of the tree; list indices are passed over."""
    section: type[BaseModel] = Config
    for part in location:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(str(part))
        inner = _model_class(field.annotation) if field else None
        if inner is None:
            return None
        section = inner
    return section


def _model_class(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_class(arg))), None)


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        inner = _model_class(field.annotation)
        if inner is not None:
            keys += _all_keys(inner, f"{prefix}{name}.")
    return keys
