"""Translate settings of verl, TRL, OpenRLHF and ROLL to keys of this project, for messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from grpo_dist.config.peer_row import Row
from grpo_dist.config.peer_table import PEER_TABLE

_MOST_MEANINGS = 2
# A last word that many settings share identifies none of them.
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


@dataclass(frozen=True, slots=True)
class Found:
    """A setting ``name`` of ``framework``, found in ``row``."""

    framework: str
    name: str
    row: Row


def hint(key: str, value: Any = None, *, ends: bool = True) -> str | None:
    """Return what to set instead of ``key``, an unknown dotted key, or None if no framework has it. If
    ``value`` is a mapping, return a hint for each setting in it. ``ends``: see `lookup`.

        num_generations -> did you mean `batch.samples_per_prompt`? (TRL's `num_generations`)
    """
    if isinstance(value, Mapping) and key in _sections():
        inside: dict[str, list[str]] = {}
        for path in _leaves(value, f"{key}."):
            if found := lookup(path):
                inside.setdefault(_describe(found), []).append(f"`{path}`")
        if inside:
            return "; ".join(f"{', '.join(paths)}: {text}" for text, paths in inside.items())
    found = lookup(key, ends=ends)
    return _describe(found) if found else None


def lookup(key: str, *, ends: bool = True) -> list[Found]:
    """Return the settings named ``key``, else the section of a table row that contains it; with ``ends`` also
    those with the longest common end, or in a section named ``key``. Return none for a word with more than
    two meanings, such as `path`.

        critic.model.path -> verl's `critic`; filter_groups -> what is in verl's `algorithm.filter_groups`
    """
    key = key.lstrip("-+").replace("-", "_")
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if found := _whole().get(".".join(parts[:end]), []):
            return found
    if not ends:
        return []
    for start in range(len(parts)):
        wanted = ".".join(parts[start:])
        if wanted not in _GENERIC and (found := _few(_whole(), wanted) or _few(_ends(), wanted)):
            return found
    return _few(_sections(), key)


def _few(names: Mapping[str, list[Found]], wanted: str) -> list[Found]:
    found = names.get(wanted, [])
    return found if len({one.row.ours for one in found}) <= _MOST_MEANINGS else []


def _describe(found: list[Found]) -> str:
    """Describe each row once, with all frameworks that share it."""
    by_row: dict[tuple[str, ...], list[Found]] = {}
    for one in found:
        by_row.setdefault(one.row.ours, []).append(one)
    return " ".join(_of_row(ones[0].row, ones) for ones in by_row.values())


def _of_row(row: Row, found: list[Found]) -> str:
    names = ", ".join(f"{one.framework}'s `{one.name}`" for one in found)
    if not row.ours:
        return f"{names} has no counterpart: {row.note}"
    keys = " and ".join(f"`{key}`" for key in row.ours)
    return f"did you mean {keys}? ({names}{f'; {row.note}' if row.note else ''})"


@lru_cache
def _whole() -> Mapping[str, list[Found]]:
    """Map full names to settings."""
    found: dict[str, list[Found]] = {}
    for row in PEER_TABLE:
        for framework, names in row.names.items():
            for name in names:
                found.setdefault(name, []).append(Found(framework, name, row))
    return found


@lru_cache
def _ends() -> Mapping[str, list[Found]]:
    """Map every dotted suffix of a name to its settings: train_batch_size for `data.train_batch_size`."""
    return _by_parts(lambda size: ((start, size) for start in range(size)))


@lru_cache
def _sections() -> Mapping[str, list[Found]]:
    """Map every part of a name before its end to the settings in it: rollout, actor_rollout_ref.rollout."""
    return _by_parts(lambda size: combinations(range(size), 2))


def _by_parts(spans: Callable[[int], Iterable[tuple[int, int]]]) -> Mapping[str, list[Found]]:
    """Map parts of names to their settings. ``spans``: first word and end of each part of so many words."""
    found: dict[str, list[Found]] = {}
    for name, own in _whole().items():
        words = name.split(".")
        for start, end in spans(len(words)):
            found.setdefault(".".join(words[start:end]), []).extend(own)
    return found


def _leaves(value: Any, prefix: str) -> Iterator[str]:
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
