"""Translates a recipe's settings to this project's configuration, by its trainer's table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pydantic import ValidationError

from grpo_dist.config import Config
from grpo_dist.config.base import member_called, tagged_unions
from grpo_dist.config.messages import explain, readable
from grpo_dist.config.peers import UNSET, Row, Trainer, of_value
from grpo_dist.tools.recipe_import.expressions import PLACE, Uncomputable, evaluate, listed
from grpo_dist.tools.recipe_import.readers import Recipe, Setting

Path = tuple[str | int, ...]
_NOTHING = "off, or as it is here, or without effect: nothing to set"
_PLACEHOLDERS: tuple[tuple[Path, str], ...] = (
    (("model", "path"), "MODEL"),
    (("data", "train", 0, "path"), "DATA"),
)
_MOST_REFUSALS = 60
_MAPPINGS = ("rollout.engine", "data.template_kwargs")  # keys are other libraries' names
_OWN_REWARDS = "my_rewards:"
_NO_KEY: Any = object()


@dataclass(slots=True)
class Entry:
    """The translation of a setting.

    Attributes:
        source: the recipe's setting, or the origin of the value.
        values: our keys and values; empty: none.
        remark: reason for no value, or a note.
        kind: written; answered: nothing to write, with the reason; lost: cannot be carried over; unknown: not
            in any table; added: the trainer's default, not in the recipe.
    """

    source: str
    values: dict[Path, Any] = field(default_factory=dict)
    remark: str = ""
    kind: str = "written"


@dataclass(frozen=True, slots=True)
class Translation:
    trainer: Trainer
    entries: tuple[Entry, ...]
    remarks: tuple[str, ...]

    def tree(self) -> dict[str, Any]:
        """Return the configuration."""
        return _tree(self.entries)

    def count(self, *kinds: str) -> int:
        return sum(entry.kind in kinds for entry in self.entries)


def translate(recipe: Recipe, trainer: Trainer) -> Translation:
    """Translate a ``recipe`` of ``trainer`` to a valid configuration."""
    reader = _Reader(recipe, trainer)
    entries = [reader.entry(setting) for setting in recipe.settings]
    _spread(entries)
    _drop_doubles(entries)
    entries += reader.unwritten(entries)
    _spread(entries)
    paths = {path for entry in entries for path in entry.values}
    for path, text in _PLACEHOLDERS:
        if path not in paths and not (path[:2] == ("data", "train") and _environment_brings_rows(entries)):
            entries.append(Entry("not in the recipe: set it", {path: text}, kind="added"))
    remarks = _make_valid(entries)
    placeholders = [value for entry in entries for value in entry.values.values() if _is_placeholder(value)]
    remarks += [f"rewards to write, or to name otherwise: {', '.join(placeholders)}"] if placeholders else []
    return Translation(trainer, tuple(entries), (*recipe.remarks, *remarks))


def _tree(entries: Iterable[Entry]) -> dict[str, Any]:
    return _nest({path: value for entry in entries for path, value in entry.values.items()})


def _environment_brings_rows(entries: Sequence[Entry]) -> bool:
    paths = [path for entry in entries for path in entry.values]
    return any(path[-1] == "environment" and path[:2] == ("data", "train") for path in paths)


class _Reader:
    def __init__(self, recipe: Recipe, trainer: Trainer) -> None:
        self.trainer = trainer
        self.given = {setting.name: setting.value for setting in recipe.settings}
        self.by_row = {id(row): value for name, value in self.given.items() if (row := trainer.row(name))}
        # All settings by name, for use in expressions.
        self.values = {name: self.value_of(name) for name in (*trainer.rows, *self.given)}

    def entry(self, setting: Setting) -> Entry:
        row = self.trainer.row(setting.name)
        if row is None and setting.value in ({}, None):
            return Entry(str(setting), remark="nothing is set in it", kind="answered")
        if row is None:
            return Entry(str(setting), remark="no table has it", kind="unknown")
        if row.keys and not row.lost and (inner := self._strip_section(setting.name)):
            if row.keys[0] not in _MAPPINGS:
                keys = " and ".join(f"`{key}`" for key in row.keys)
                return Entry(str(setting), remark=f"part of {keys}: {row.note or 'set it'}", kind="lost")
            row = replace(row, keys=tuple(f"{key}.{inner}" for key in row.keys))
        return self.converted(f"{setting}{self._assumed(row)}", row, setting.value, setting.name)

    def _strip_section(self, name: str) -> str:
        """Return the rest of a name if only its section is in the table; "" if the name is in it."""
        words = name.split(".")
        ends = (end for end in range(len(words), 0, -1) if ".".join(words[:end]) in self.trainer.rows)
        return ".".join(words[next(ends, len(words)) :])

    def converted(self, source: str, row: Row, value: Any, name: str) -> Entry:
        """Apply a table row to a value."""
        result = self._result(row, value)
        if result is None:
            return Entry(source, remark=_NOTHING if row.keys or row.lost else row.note, kind="answered")
        if isinstance(result, _Reason):
            return Entry(source, remark=str(result), kind="lost" if result.lost else "answered")
        indices = [int(part) for part in name.split(".") if part.isdigit()]
        many = len(row.keys) > 1 and isinstance(result, list) and len(result) == len(row.keys)
        parts = result if many else [result] * len(row.keys)
        pairs = [pair for pair in zip(row.keys, parts, strict=True) if pair[1] is not None]
        values = {path: one for key, part in pairs for path, one in _placed(key, part, indices)}
        return Entry(source, values) if values else Entry(source, remark=_NOTHING, kind="answered")

    def _assumed(self, row: Row) -> str:
        """Name the trainer's default counts that a value depends on, if the recipe does not set them."""
        names = dict.fromkeys(PLACE.findall(row.expression))
        rows = {name: self.trainer.rows[name] for name in names if name in self.trainer.rows}
        numbers = [
            f"{name}={one.default}"
            for name, one in rows.items()
            if id(one) not in self.by_row and type(one.default) is int and one.default > 0
        ]
        return f", {', '.join(numbers)} by default" if numbers else ""

    def _result(self, row: Row, value: Any) -> Any:
        """Return our value; None: nothing to write; or a reason."""
        if isinstance(value, str) and "$(" in value and "slug" not in row.expression:
            return _Reason("what a command prints; set it", lost=True)
        mapped = of_value(row, value)
        names = [one for one in row.values.values() if one is not None and not _is_reason(one)]
        is_code = any(key.endswith(".function") for key in row.keys) and not row.expression
        if mapped is UNSET and names and row.keys and (isinstance(value, list) or (is_code and value)):
            return self._each(row, listed(value), is_code=is_code)
        if mapped is not UNSET and not row.expression:
            return _Reason(mapped, lost=True) if _is_reason(mapped) else mapped
        if row.expression and mapped is UNSET:
            try:
                return evaluate(row.expression, {"value": value, **self.values})
            except Uncomputable:
                return _Reason(row.note or f"the value follows from {row.expression}", lost=True)
        if mapped is not UNSET:
            return mapped
        if names or not row.keys or row.lost:
            reason = row.note or "no such value here"
            return _Reason(reason, lost=row.lost or bool(row.keys))
        return value

    @staticmethod
    def _each(row: Row, items: list[Any], *, is_code: bool) -> Any:
        """Map each item of a list; items without a mapping are user code, to be named."""
        names = [of_value(row, item) for item in items]
        known = [name for name in names if name is not UNSET and name is not None]
        if not known and (not is_code or any("/" in str(item) for item in items)):
            return _Reason(f"{row.note}; a model is `rewards.models`" if is_code else row.note, lost=True)
        return [n if n in known else f"{_OWN_REWARDS}{_word(i)}" for i, n in zip(items, names, strict=True)]

    def value_of(self, name: str) -> Any:
        """Return a setting of the recipe, else the trainer's default, else None."""
        if name in self.given:
            return self.given[name]
        row = self.trainer.rows.get(name)
        if row is None:
            return None
        return self.by_row.get(id(row), None if row.default is UNSET else row.default)

    def unwritten(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        """Yield the trainer's defaults that differ from ours, and values derived from others."""
        written = {path for entry in entries for path in entry.values}
        defaults, derived = list(self._defaults(written)), list(self._derived(written))
        config = {path: v for entry in (*entries, *defaults, *derived) for path, v in entry.values.items()}
        for entry in defaults:
            values = {p: v for p, v in entry.values.items() if _our_default(p, config) not in (v, _NO_KEY)}
            if values:
                yield replace(entry, values=values)
        yield from derived

    def _defaults(self, written: Set[Path]) -> Iterator[Entry]:
        """Yield the trainer's defaults for keys that are not ``written``."""
        done = set(self.by_row)
        for name, row in self.trainer.rows.items():
            if row.default is UNSET or id(row) in done:
                continue
            done.add(id(row))
            entry = self.converted(f"{self.trainer.name}'s default", row, row.default, name)
            values = {path: value for path, value in entry.values.items() if path not in written}
            yield replace(entry, values=values, kind="added")

    def _derived(self, written: Set[Path]) -> Iterator[Entry]:
        """Yield the values that follow from several settings, for keys that are not ``written``."""
        for key, expression in self.trainer.derived.items():
            try:
                value = evaluate(expression, self.values)
            except Uncomputable:
                continue
            paths = [path for path, _ in _placed(key, value, [])]
            if value is not None and written.isdisjoint(paths):
                yield Entry(f"as in {self.trainer.name}", dict(_placed(key, value, [])), kind="added")


class _Reason(str):
    """Reason why a setting has no value here."""

    lost: bool

    def __new__(cls, text: str, *, lost: bool) -> _Reason:
        reason = super().__new__(cls, text)
        reason.lost = lost
        return reason


def _is_reason(value: Any) -> bool:
    return isinstance(value, str) and " " in value


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(_OWN_REWARDS)


def _word(item: Any) -> str:
    """Return the last name of code: `rewards.f(0.5)` -> f."""
    match = re.match(r"[\w.]+", str(item))
    return (match[0] if match else "").rpartition(".")[2] or "reward"


def _placed(key: str, value: Any, indices: Sequence[int]) -> Iterator[tuple[Path, Any]]:
    """Yield paths and values of a key. Its `N` stands for positions: of a list's items, in the setting's
    name, or all.
    """
    parts = key.split(".")
    if "N" not in parts:
        yield tuple(parts), value
        return
    at = parts.index("N")
    items = list(enumerate(value)) if isinstance(value, list) else [(indices[0] if indices else "*", value)]
    if parts[-1] in ("path", "function", "environment") and not isinstance(value, list) and not indices:
        items = [(0, value)]
    for index, item in items:
        if item is not None or not isinstance(value, list):
            yield (*parts[:at], index, *parts[at + 1 :]), item


def _spread(entries: Sequence[Entry]) -> None:
    """Copy a value for all entries of a list into each entry."""
    paths = [path for entry in entries for path in entry.values]
    lengths = dict[Path, int]()
    for path in paths:
        at = next((i for i, part in enumerate(path) if isinstance(part, int)), None)
        if at is not None:
            lengths[path[:at]] = max(lengths.get(path[:at], 0), int(path[at]) + 1)
    sources = {path[:3] for path in paths if path[0] == "data" and path[-1] in ("path", "environment")}
    for place in {source[:2] for source in sources}:
        lengths[place] = sum(source[:2] == place for source in sources)  # ignores longer lists
    lengths.setdefault(("data", "train"), 1)
    for entry in entries:
        for path in list(entry.values):
            if isinstance(path[-2:][0], int) and path[:-2] in lengths and int(path[-2]) >= lengths[path[:-2]]:
                del entry.values[path]
    for entry in entries:
        for path, value in list(entry.values.items()):
            if "*" in path and path[: path.index("*")] in lengths:
                at = path.index("*")
                del entry.values[path]
                places = {(*path[:at], i, *path[at + 1 :]): value for i in range(lengths[path[:at]])}
                entry.values |= {place: one for place, one in places.items() if place not in paths}
            elif "*" in path:
                del entry.values[path]
        if not entry.values and entry.kind == "written":
            entry.kind, entry.remark = "answered", entry.remark or "nothing here that it is about"


def _drop_doubles(entries: Sequence[Entry]) -> None:
    """Keep the last of several values of a key."""
    last = {path: entry for entry in entries for path in entry.values}
    for entry in entries:
        for path in list(entry.values):
            if last[path] is not entry:
                same = last[path].values[path] == entry.values.pop(path)
                if not entry.values:
                    entry.remark = f"{'as' if same else 'replaced by'} `{_dotted(path)}` below"
                    entry.kind = "answered"


def _make_valid(entries: list[Entry]) -> list[str]:
    """Remove values that the configuration refuses, with the reason, defaults first."""
    for _ in range(_MOST_REFUSALS):
        try:
            Config.model_validate(_tree(entries))
            return []
        except ValidationError as error:
            if not _take_out(entries, error):
                return [f"to be corrected: {explain(error.errors(), Config)}"]
    return []


def _take_out(entries: list[Entry], error: ValidationError) -> bool:
    """Remove the values that cause an error from their entries; return whether there were any."""
    removed, errors = False, error.errors()
    for location in [tuple(each["loc"]) for each in readable(errors, Config)]:
        about = [one for one in errors if any(tuple(e["loc"]) == location for e in readable([one], Config))]
        reason = explain(about, Config)
        entry, path = _entry_at(entries, location) if location else _entry_named(entries, reason)
        if entry is not None:
            entry.values = {p: v for p, v in entry.values.items() if p[: len(path)] != path}
            if not entry.values:
                entry.kind = "lost" if entry.kind == "written" else "dropped"
                entry.remark = reason.split(" (")[0] if location else reason.split("; ")[0]
            removed = True
    return removed


def _entry_at(entries: Sequence[Entry], location: Path) -> tuple[Entry | None, Path]:
    """Return the entry that set a key, a key below it, or the section that lacks it."""
    for end in range(len(location), 0, -1):
        for entry in reversed(entries):
            for path in entry.values:
                if path[:end] == location[:end]:
                    return entry, path if end < len(location) else location
    return None, ()


def _entry_named(entries: Sequence[Entry], reason: str) -> tuple[Entry | None, Path]:
    """Return the entry of the last key that a contradiction names; prefer defaults over recipe settings."""
    paths = [tuple(name.split(".")) for name in re.findall(r"`([a-z_.0-9]+)`", reason.split(";")[0])]
    for kinds in (("added",), ("written",)):
        for name in reversed(paths):
            for entry in entries:
                for path in entry.values:
                    if entry.kind in kinds and tuple(map(str, path))[: len(name)] == name:
                        return entry, path
    return None, ()


def _nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Nest ``values`` as mappings and lists. A union member's name becomes a key beside its settings."""
    tree: dict[Any, Any] = {}
    sections = {path[:end] for path in values for end in range(1, len(path))}
    for path, value in values.items():
        if path in sections and not isinstance(value, dict):
            path = (*path, TAGS.get(plain_path(path), "name"))
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        here = node.get(path[-1])
        both = isinstance(here, dict) and isinstance(value, dict)
        node[path[-1]] = here | value if both else deepcopy(value)
    return _lists(tree)


def plain_path(path: Path) -> tuple[str, ...]:
    """Return a path with * for list positions."""
    return tuple("*" if isinstance(part, int) else part for part in path)


def _lists(node: Any) -> Any:
    """Convert mappings with positions as keys to lists."""
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, int) for key in node):
        return [_lists(node[key]) for key in sorted(node)]
    return {key: _lists(value) for key, value in node.items()}


def _get(tree: Any, path: Path) -> Any:
    """Return the value at a path of a dumped configuration; for a union its name."""
    for part in path:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list | tuple) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            return None
    if isinstance(tree, dict) and (tag := TAGS.get(plain_path(path))):
        return tree.get(tag)
    return list(tree) if isinstance(tree, tuple) else tree


def _our_default(path: Path, config: Mapping[Path, Any]) -> Any:
    """Return our default of a key; in a union, that of the member that ``config`` names. `_NO_KEY`: this
    member lacks the key.
    """
    if path[:-1] in config and (union := _UNIONS.get(plain_path(path[:-1]))):
        member = member_called(union, str(config[path[:-1]]).lower())
        setting = member.model_fields.get(str(path[-1])) if member else None
        return setting.default if setting else _NO_KEY
    return _get(_least_config(), path)


@cache
def _least_config() -> Mapping[str, Any]:
    """Return a configuration of defaults, dumped."""
    least = {"model": {"path": "m"}, "data": {"train": [{"path": "d"}]}}
    return Config.model_validate(least).model_dump()


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


_UNIONS = dict(tagged_unions(Config))
# Paths where a name selects a union member, and the full key.
TAGS: Mapping[tuple[str, ...], str] = {path: union[0].tag for path, union in _UNIONS.items()}
