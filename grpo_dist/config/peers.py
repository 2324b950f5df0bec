"""Settings of other trainers, with the keys of this project that have the same effect.

`grpo_dist/config/trainers` has a file for each trainer, which `grpo-dist import` reads, too. A file has

    trainer, version: name and release of the trainer.
    words: texts that identify a script of the trainer.
    extends: another file; rows of this file replace its rows of the same name.
    settings: by section of the trainer, then by name; names with one meaning share a row; `""`: no section.
    derived: keys of this project that follow from several settings, as expressions.

A row is a key of this project, or a mapping of
    key: one key or several; `N` is a list index.
    note: the conversion, or the alternative.
    values: the trainer's values with this project's; null: nothing to write. A text with a blank is a reason.
    as: an expression of `{value}` and of other settings, e.g. `{data.train_batch_size} / {value}`.
    default: the trainer's value where a recipe has none.
    none: why there is no counterpart, although nothing is lost.
    lost: why the setting cannot be carried over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parent / "trainers"
UNSET: Any = object()  # a trainer's default missing in the tables, or a value missing in a recipe

ANSWERS = Path(__file__).parent / "answers.yaml"  # advice for keys and values outside of the trainers' tables
_MOST_MEANINGS = 2
_FEWEST = 3  # keys that identify a recipe's trainer
# Last words that too many settings share.
_GENERIC = (
    "backend",
    "enable",
    "enabled",
    "filters",
    "mode",
    "name",
    "num_workers",
    "path",
    "save_path",
    "type",
)
_MOST_NAMED = 3  # trainers that one answer names


@dataclass(frozen=True, slots=True)
class Row:
    """The counterpart of a trainer's setting; see the module. ``keys``: empty if there is none."""

    keys: tuple[str, ...] = ()
    note: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    expression: str = ""
    default: Any = UNSET
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Trainer:
    """The table of a trainer. ``rows``: by the full name of a setting."""

    name: str
    version: str
    words: tuple[str, ...]
    rows: Mapping[str, Row]
    derived: Mapping[str, str]

    def row(self, name: str, *, inside: bool = True) -> Row | None:
        """Return the row of a setting: by name, else by the longest matching pattern, else with ``inside`` by
        an enclosing section.
        """
        if row := self.rows.get(name):
            return row
        patterns = [pattern for pattern in self.rows if "*" in pattern and fnmatchcase(name, pattern)]
        patterns.sort(key=len, reverse=True)
        words = name.split(".")
        sections = (".".join(words[:end]) for end in range(len(words) - 1, 0, -1) if inside)
        return next((self.rows[one] for one in (*patterns, *sections) if one in self.rows), None)


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """A setting ``name`` of the trainer ``trainer``."""

    trainer: str
    name: str
    row: Row


@cache
def answers() -> Mapping[str, Mapping[str, Any]]:
    """Read the advice for keys of earlier versions, guessed keys, and values without a counterpart."""
    return yaml.safe_load(ANSWERS.read_text())


@cache
def trainers() -> Mapping[str, Trainer]:
    """Read all tables, by file name, the most used trainers first."""
    first = ("verl", "trl", "openrlhf", "roll")
    names = {path.stem for path in TABLES.glob("*.yaml")}
    return {name: _read(name) for name in (*first, *sorted(names.difference(first)))}


@cache
def _read(name: str) -> Trainer:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table = yaml.load((TABLES / f"{name}.yaml").read_text(), loader)
    rows, derived = dict[str, Row](), dict[str, str]()
    if base := table.get("extends"):
        rows, derived = dict(_read(base).rows), dict(_read(base).derived)
    for section, settings in table["settings"].items():
        for names, row in (settings or {}).items():
            parsed = _row(row)
            for prefix in section.split() or [""]:
                rows |= {f"{prefix}.{one}" if prefix else one: parsed for one in str(names).split()}
    derived |= table.get("derived", {})
    return Trainer(table["trainer"], str(table["version"]), tuple(table["words"]), rows, derived)


def _row(row: str | Mapping[str, Any]) -> Row:
    if isinstance(row, str):
        return Row(tuple(row.split()))
    note = row.get("none") or row.get("lost") or row.get("note", "")
    values = {_plain(name): value for name, value in row.get("values", {}).items()}
    keys = tuple(row.get("key", "").split())
    return Row(keys, note, values, row.get("as", ""), row.get("default", UNSET), "lost" in row)


def _plain(value: Any) -> str:
    """Return a value as tables name it: true for True, none for None, 1 for 1.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "none" if value is None else str(value).lower()


def of_value(row: Row, value: Any) -> Any:
    """Return the table's counterpart of ``value``; `UNSET` if there is none."""
    return row.values.get(_plain(value), UNSET)


def hint(key: str, *, ends: bool = True, inside: bool = True, trainer: str | None = None) -> str | None:
    """Return what to set instead of ``key``, an unknown dotted key, or None if no trainer has it. ``ends``,
    ``inside``: see `lookup`. ``trainer``: the trainer whose meaning is preferred.

        num_generations -> did you mean `batch.samples_per_prompt`? (TRL's `num_generations`)
    """
    if now := answer(key):
        return now
    settings = lookup(key, ends=ends, inside=inside)
    if trainer and (row := trainers()[trainer].row(key, inside=inside)):
        settings = [PeerSetting(trainers()[trainer].name, _plain_name(key), row)]
    by_row: dict[tuple[str, ...], list[PeerSetting]] = {}
    for setting in settings:
        by_row.setdefault(setting.row.keys, []).append(setting)
    return " ".join(map(_describe, by_row.values())) or None


def likely_trainer(keys: Iterable[str]) -> str | None:
    """Return the file name of the trainer that has most of ``keys``, at least `_FEWEST`."""
    names = [_plain_name(key) for key in keys]
    if len(names) < _FEWEST:
        return None  # most errors need no tables, which are slow to read
    counts = {
        file: sum(trainer.row(name) is not None for name in names) for file, trainer in trainers().items()
    }
    best = max(counts, key=lambda file: counts[file])
    return best if counts[best] >= _FEWEST else None


def answer(key: str) -> str | None:
    """Return what to write instead of a key of an earlier version or an often guessed key; else None."""
    name = ".".join(part for part in key.split(".") if not part.isdigit())
    now = answers()["earlier"].get(name)
    return answers()["guesses"].get(name) if now is None else f"an earlier version had it; write {now}"


def lookup(key: str, *, ends: bool = True, inside: bool = True) -> list[PeerSetting]:
    """Return the settings named ``key``, else with ``inside`` a table's section that contains it. With
    ``ends`` also match the longest common end, or settings in a section named ``key``. Return [] for a name
    with more than two meanings, such as `path`.

        critic.model.path -> verl's `critic`; filter_groups -> settings in verl's `algorithm.filter_groups`
    """
    words = _plain_name(key).split(".")
    for end in range(len(words), 0 if inside else len(words) - 1, -1):
        if settings := _few(_index()[0], ".".join(words[:end])):
            return settings
    for start in range(len(words)) if ends else ():
        rest = ".".join(words[start:])
        if rest not in _GENERIC and (settings := _few(_index()[1], rest) or _few(_index()[0], rest)):
            return settings
    return _few(_index()[2], ".".join(words)) if ends else []


def _plain_name(key: str) -> str:
    return key.lstrip("-+~").replace("-", "_")


def is_section(key: str) -> bool:
    """Return whether ``key`` names a section of another trainer."""
    return key in _index()[2]


def _describe(settings: list[PeerSetting]) -> str:
    """Describe a row and the settings that map to it."""
    match, by_name = settings[0].row, dict[str, list[str]]()
    for setting in settings:
        by_name.setdefault(setting.name, []).append(setting.trainer)
    names = ", ".join(
        f"{one[0]}'s `{name}`" if len(one) == 1 else f"`{name}` of {', '.join(one[:_MOST_NAMED])}"
        for name, one in list(by_name.items())[:_MOST_NAMED]
    )
    if not match.keys:
        return f"{names} has no counterpart: {match.note}"
    keys = " and ".join(f"`{key}`" for key in match.keys)
    return f"did you mean {keys}? ({names}{f'; {note}' if (note := explanation(match)) else ''})"


def explanation(row: Row) -> str:
    """Describe how a value is converted."""
    renamed = {old: new for old, new in row.values.items() if isinstance(new, str) and " " not in new}
    alike = [old for old, new in renamed.items() if old == new]
    parts = [f"{old}: {new}" for old, new in renamed.items() if old != new]
    parts += [f"{', '.join(alike)} alike"] if parts and alike else []
    formula = row.expression if len(row.expression) < 80 and not row.note else ""
    plain = formula.replace("{value}", "the value").replace("{", "").replace("}", "")
    return "; ".join(part for part in (row.note, plain, "; ".join(parts)) if part)


def _few(names: Mapping[str, list[PeerSetting]], name: str) -> list[PeerSetting]:
    settings = names.get(name, [])
    return settings if len({setting.row.keys for setting in settings}) <= _MOST_MEANINGS else []


@cache
def _index() -> tuple[Mapping[str, list[PeerSetting]], ...]:
    """Map to settings: full names; their dotted ends (train_batch_size of `data.train_batch_size`); and their
    sections (rollout, actor_rollout_ref.rollout).
    """
    whole, ends, sections = (dict[str, list[PeerSetting]]() for _ in range(3))
    indexed = dict[tuple[str, int], None]()
    for setting in (
        PeerSetting(trainer.name, name, row)
        for trainer in trainers().values()
        for name, row in trainer.rows.items()
        if "*" not in name
    ):
        if (setting.name, id(setting.row)) in indexed:
            continue  # inherited by `extends`
        indexed[setting.name, id(setting.row)] = None
        words = setting.name.split(".")
        spans = [(start, end) for end in range(1, len(words) + 1) for start in range(end)]
        whole.setdefault(setting.name, []).append(setting)
        _add(ends, setting, (".".join(words[a:b]) for a, b in spans if b == len(words)))
        _add(sections, setting, (".".join(words[a:b]) for a, b in spans if b < len(words)))
    return whole, ends, sections


def _add(index: dict[str, list[PeerSetting]], setting: PeerSetting, names: Iterable[str]) -> None:
    for name in names:
        index.setdefault(name, []).append(setting)
