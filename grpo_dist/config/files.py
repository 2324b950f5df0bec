"""Configuration files: OmegaConf reads, merges and interpolates; the typed tree of `config` validates the
result.

A file may name base files, relative to itself or in this project's configs/. Later base files override
earlier ones, the file overrides its base files, and the command line overrides the file:

    defaults: [base.yaml, algorithms/grpo.yaml]
    policy: {num_workers: 2}

A section that a name chooses (`config.base.Tagged`), such as `algorithm.loss`, is replaced by a mapping with
another name, and merged with a mapping that has the same name or none:

    loss: sapo               and  loss: {tau_positive: 2}   make  loss: {name: sapo, tau_positive: 2}
    loss: {name: sapo, ...}  and  loss: {name: ppo_clip}    make  loss: {name: ppo_clip}

On the command line ``+algorithm=dapo`` replaces the file's `algorithm` section by the section of the preset
configs/algorithms/dapo.yaml, merges the preset's other sections, and drops the settings that the file's
preset made in other sections. Values on the command line apply to the result, in any position.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from functools import cache, reduce
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from grpo_dist.config import Config
from grpo_dist.config.base import Choice, is_bare, tagged_unions
from grpo_dist.config.messages import explain
from grpo_dist.config.presets import PRESETS
from grpo_dist.config.secrets import HIDDEN, hidden_keys, masked, masked_setting, masked_text
from grpo_dist.config.text import check_characters, check_key, check_yaml, escaped
from grpo_dist.errors import UserError, expanded

_OVERRIDE = re.compile(r"\+?[A-Za-z_][\w.\-\[\]]*=")
_UNREADABLE = re.compile(r"(at input |error at: |the tag )'.*?'(?=\s|$)")
S = TypeVar("S", bound=BaseModel)


class ConfigError(UserError):
    """A configuration that cannot be used. The message names key, value, requirement and remedy, with *** for
    secrets.
    """

    def __init__(self, message: str) -> None:
        super().__init__(masked_text(message))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, its defaults and ``key=value`` overrides into the frozen tree.

    Raises ConfigError for a missing or malformed file, a pipeline, an unknown key, a bad value, *** instead
    of a secret, or values that contradict.
    """
    return validated(apply_overrides(read_config(Path(path)), overrides, Path(path)), path, Config)


def load_recorded(path: Path) -> Config:
    """Read what `dump_config` wrote for a run, with *** for secrets. Raises ConfigError as `load_config`."""
    return checked(_resolved(read_tree(path), path), path, Config)


def is_override(text: str) -> bool:
    """Return whether a command-line argument is ``key=value`` or ``+algorithm=PRESET``, and not the path of
    an existing file that contains "=".
    """
    # Unlike Path's method, `os.path.exists` is False for a name that is too long.
    return _OVERRIDE.match(text) is not None and not os.path.exists(text)


def apply_overrides(tree: DictConfig, overrides: Sequence[str], path: Path) -> DictConfig:
    """Apply overrides to ``tree``, which may be modified: presets first, then values in order, so a preset
    never undoes a value. ``path``: the file of the tree.
    """
    for override in sorted(overrides, key=lambda text: not text.startswith("+")):  # a stable sort
        if override.startswith("+"):
            tree = _apply_preset(tree, override, path)
        else:
            set_from_text(tree, override)
    return tree


def validated(tree: DictConfig, where: str | Path, section: type[S], *, unread: tuple[str, ...] = ()) -> S:
    """Resolve interpolations of ``tree`` and validate it. Raises ConfigError that begins with ``where``.

    Refuses *** instead of a secret, except in keys that begin with one of ``unread``.
    """
    plain = _resolved(tree, where)
    config = checked(plain, where, section)
    if hidden := [key for key in hidden_keys(plain) if not key.startswith(unread)]:
        keys = ", ".join(f"`{key}`" for key in hidden)
        raise ConfigError(
            f"{where}: {HIDDEN} in {keys} stands for a secret that a recorded configuration does not hold; "
            "set it again: null where the code reads the environment itself, or '${oc.env:NAME}' for the "
            "value of the variable NAME"
        )
    return config


def _resolved(tree: DictConfig, where: str | Path) -> Any:
    """Return ``tree`` as plain mappings and lists, with interpolations resolved."""
    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        raise ConfigError(f"{where}: {parser_reason(error)}") from error


def checked(plain: Any, where: str | Path, section: type[S]) -> S:
    """Validate plain mappings and lists. Raises ConfigError that begins with ``where``."""
    try:
        check_characters(plain)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    try:
        return section.model_validate(plain)
    except ValidationError as error:
        # A validator's message may contain the value of another key.
        raise ConfigError(masked_text(f"{where}: {explain(error.errors(), section)}", plain)) from error


def changed(config: S, changes: Mapping[str, Any]) -> S:
    """Return ``config`` with dotted keys set, validated again. Raises ValueError if it is invalid.

    Unchanged sections are not validated again: a plan validates hundreds of splits.
    """
    sections = {key.partition(".")[0] for key in changes}
    plain = {name: getattr(config, name) for name in type(config).model_fields}
    plain |= config.model_dump(include=sections)
    for key, value in changes.items():
        *path, last = key.split(".")
        section: Any = plain
        for part in path:
            section = section[part if isinstance(section, dict) else int(part)]
        section[last] = value
    return type(config).model_validate(plain)


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML, with all defaults, and *** for secrets."""
    return to_yaml(masked(config.model_dump(mode="json")))


def to_yaml(plain: Any) -> str:
    """Return resolved settings, plain mappings and lists, as YAML that `load_config` reads unchanged."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(plain)))


def read_config(path: Path) -> DictConfig:
    """Return `read_tree` of the configuration of one run. Raises ConfigError for a pipeline."""
    tree = read_tree(path)
    if "stages" in tree:
        raise ConfigError(
            f"{path}: a pipeline; expected the configuration of one run. `grpo-dist pipeline {path}` runs "
            "it, and with --check reports problems and the memory of each stage; on a cluster submit its "
            "stages in turn with --after, or all as one job of Slurm (launch/README.md)"
        )
    return tree


def read_tree(path: Path, seen: tuple[Path, ...] = ()) -> DictConfig:
    """Read a file and merge it over its defaults, without resolving interpolations. ``seen``: the files whose
    `defaults` led to this one.
    """
    try:
        resolved, is_file = path.resolve(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # an invalid file name, or a cycle of links
        reason = error.strerror if isinstance(error, OSError) else str(error)[:200]
        raise ConfigError(f"{ascii(str(path))[:200]}: no configuration file ({reason})") from error
    if resolved in seen:
        raise ConfigError(
            f"{path}: `defaults` form a cycle: {' -> '.join(p.name for p in (*seen, resolved))}"
        )
    if not is_file:
        raise ConfigError(f"{path}: no such configuration file; pass a YAML file, e.g. configs/demo.yaml")
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        loaded = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, RecursionError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {parser_reason(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of keys to values, found {type(loaded).__name__}")
    if path.parent.name == PRESETS.name:
        loaded = _set_preset_name(loaded, path.stem)
    bases, settings = _split_bases(loaded, path)
    parts = [read_tree(_base_file(path, base), (*seen, resolved)) for base in bases]
    try:
        return reduce(merge, [*parts, settings])
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be merged with its `defaults`: {parser_reason(error)}") from error


def merge(base: DictConfig, over: DictConfig) -> DictConfig:
    """Return ``over`` merged into ``base``; changes neither."""
    plain = [OmegaConf.to_container(tree, resolve=False) for tree in (base, over)]
    merged = OmegaConf.merge(*map(OmegaConf.create, _fit_unions(*plain)))
    assert isinstance(merged, DictConfig)
    return merged


@cache
def _tagged_unions() -> list[tuple[tuple[str, ...], tuple[type[Choice], ...]]]:
    return list(tagged_unions(Config))


def _fit_unions(base: Any, over: Any) -> tuple[Any, Any]:
    """Return two plain trees ready to be merged, see `_fit`."""
    for path, union in _tagged_unions():
        base, over = _fit(base, over, path, union)
    return base, over


def _fit(base: Any, over: Any, path: Sequence[str], union: Sequence[type[Choice]]) -> tuple[Any, Any]:
    """Return two plain trees with the tagged section at ``path`` expanded from a bare name to a mapping, and
    emptied in ``base`` where ``over`` has another name.
    """
    part, *rest = path
    if not isinstance(over, dict):
        return base, over
    first, second = copy(base), dict(over)
    for key in list(second) if part == "*" else [part] if part in second else []:
        at: Any = int(key) if isinstance(first, list) and str(key).isdigit() else key
        has = at in first if isinstance(first, dict) else _is_index(first, at)
        below = first[at] if has else {}
        if rest:
            below, second[key] = _fit(below, second[key], rest, union)
        else:
            below, second[key] = _name_members(below, second[key], union)
        if has:
            first[at] = below
    return first, second


def _name_members(before: Any, after: Any, union: Sequence[type[Choice]]) -> tuple[Any, Any]:
    """Return a tagged section of both trees as mappings, the first empty if the second has another name."""
    tag = union[0].tag
    if _is_name(after, union) and union[0].bare is not None:
        return {}, {union[0].bare: after}
    before, after = ({tag: value} if _is_name(value, union) else value for value in (before, after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return before, after
    name = before.get(tag, union[0].model_fields[tag].get_default())
    return before if after.get(tag, name) == name else {}, after


def _is_index(items: Any, at: Any) -> bool:
    return isinstance(items, list) and isinstance(at, int) and at < len(items)


def _is_name(value: Any, union: Sequence[type[Choice]]) -> bool:
    return is_bare(value, union) and "${" not in str(value)


def _base_file(path: Path, base: str) -> Path:
    """Return the base file ``base`` of ``path``: next to it, else in this project's configs/."""
    file = expanded(base)
    near = path.parent / file
    try:
        return next((each for each in (near, PRESETS.parent / file) if each.is_file()), near)
    except (OSError, ValueError):  # no file name: refused where it is read
        return near


def _set_preset_name(tree: DictConfig, name: str) -> DictConfig:
    """Return a file of a directory of presets with `algorithm.preset`, for the run and its report."""
    named = deepcopy(tree)
    if isinstance(tree.get("algorithm"), DictConfig) and tree.algorithm.get("preset") is None:
        OmegaConf.update(named, "algorithm.preset", name)
    return named


def _split_bases(loaded: DictConfig, path: Path) -> tuple[list[str], DictConfig]:
    """Return the files of `defaults`, and ``loaded`` without that key."""
    settings = deepcopy(loaded)
    try:
        defaults = settings.pop("defaults", None)
        bases = list(defaults) if isinstance(defaults, ListConfig) else [] if defaults is None else [defaults]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: `defaults`: {parser_reason(error)}") from error
    wrong = [base for base in bases if not isinstance(base, str) or not base]
    if wrong:
        raise ConfigError(
            f"{path}: `defaults`: {wrong[0]!r} is not a file name; expected a file or a list of files, e.g. "
            "[base.yaml]"
        )
    return bases, settings


def _apply_preset(merged: DictConfig, override: str, path: Path) -> DictConfig:
    """Apply ``+algorithm=NAME``: a preset next to the configuration file, or one of this project."""
    key, _, name = override.partition("=")
    directories = [path.parent / "algorithms", PRESETS]
    presets = {file.stem: file for directory in reversed(directories) for file in directory.glob("*.yaml")}
    if key != "+algorithm" or name not in presets:
        near = difflib.get_close_matches(name, presets, n=1)
        # A name that resembles no preset may be a pasted secret.
        masked = masked_setting(override) if near else f"{masked_setting(key)}=***"
        hint = f"; did you mean +algorithm={near[0]}?" if near else ""
        names = ", ".join(sorted(presets))
        raise ConfigError(f"override {masked!r}: expected +algorithm=NAME with NAME one of {names}{hint}")
    preset = read_tree(presets[name])
    plain = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(plain, dict)
    before = plain.pop("algorithm", None)
    if isinstance(before, dict) and (former := presets.get(str(before.get("preset")))) is not None:
        plain = _less(plain, OmegaConf.to_container(read_tree(former), resolve=False))
    try:
        return merge(OmegaConf.create(plain), preset)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be merged with {override}: {parser_reason(error)}") from error


def _less(tree: dict[Any, Any], other: Any) -> dict[Any, Any]:
    """Return ``tree`` without the values that ``other`` has in the same places."""
    remaining = {}
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(other.get(key), dict):
            remaining[key] = _less(value, other[key])
        elif key not in other or value != other[key]:
            remaining[key] = value
    return remaining


def set_from_text(tree: DictConfig, override: str) -> None:
    """Set a value: ``a.b=1``, or ``a.0.b=1`` in a list. YAML decides its type.

    Raises ConfigError for invalid YAML, and for a value with a comment, which YAML would drop.
    """
    key, sign, text = override.partition("=")
    masked = f"override {masked_setting(override)!r}"
    if not sign or not key:
        raise ConfigError(f"{masked}: expected key=value, e.g. steps=10 or policy.optimizer.lr=1e-5")
    try:
        check_characters(override)
        check_yaml(text, single_value=True)
        read = OmegaConf.from_dotlist([f"value={text}"])
        value = OmegaConf.to_container(read, resolve=False)["value"]  # type: ignore[call-overload, index]
    except (YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        raise ConfigError(f"{masked}: {parser_reason(error)}") from error
    set_key(tree, key, value, masked)


def set_key(tree: DictConfig, key: str, value: Any, where: str) -> None:
    """Set a dotted ``key``; a mapping is merged into the existing value. Raises ConfigError that begins with
    ``where``.
    """
    try:
        check_key(key)
        section, *rest = key.split(".")
        before = OmegaConf.to_container(tree, resolve=False)
        nested = reduce(lambda inner, part: {part: inner}, [*rest[::-1], section], value)
        after, over = _fit_unions(before, nested)
        if after != before:
            OmegaConf.update(tree, section, after[section], merge=False)
        value = reduce(lambda outer, part: outer[part], [section, *rest], over)
        is_empty = isinstance(value, Mapping) and not value
        OmegaConf.update(tree, key, value, merge=not is_empty)
    except (OmegaConfBaseException, TypeError, AttributeError, ValueError, LookupError) as error:
        raise ConfigError(f"{where}: {parser_reason(error)}{_describe_lists(tree, key)}") from error


def _describe_lists(tree: DictConfig, key: str) -> str:
    """Return how to set a list whose entries ``key`` does not name; "" for other keys."""
    parts = key.split(".")
    for i, part in enumerate(parts[1:], 1):
        name = ".".join(parts[:i])
        entries = OmegaConf.select(tree, name)
        if isinstance(entries, ListConfig) and not (part.isdigit() and int(part) < len(entries)):
            there = f"0 to {len(entries) - 1}" if len(entries) else "none"
            return f"; indices of `{name}`: {there}; for another entry set the list as a whole: {name}=[...]"
    return ""


def parser_reason(error: BaseException) -> str:
    """Return a parser's message in one line, without the unreadable text, which may be a secret."""
    return _UNREADABLE.sub(r"\1'...'", str(error).replace("\n", " "))
