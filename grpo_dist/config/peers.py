"""Translate settings of verl, TRL, OpenRLHF and ROLL to keys of this project, for messages and a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_dist.config.peer_table import FRAMEWORKS, PEER_TABLE, Row

_MOST_MEANINGS = 2


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
    if isinstance(value, Mapping) and any(name.startswith(f"{key}.") for name in _whole()):
        inside = [(path, lookup(path)) for path in _leaves(value, f"{key}.")]
        known = "; ".join(f"`{path}`: {_describe(found)}" for path, found in inside if found)
        if known:
            return known
    found = lookup(key, ends=ends)
    return _describe(found) if found else None


def lookup(key: str, *, ends: bool = True) -> list[Found]:
    """Return the settings named ``key``; with ``ends`` also those with the longest common end. Return none
    for a word with more than two meanings, such as `path`.
    """
    key = key.lstrip("-+").replace("-", "_")
    if not ends:
        return _whole().get(key, [])
    parts = key.split(".")
    for start in range(len(parts)):
        wanted = ".".join(parts[start:])
        for names in (_whole(), _ends()):
            found = names.get(wanted, [])
            if found and len({one.row.ours for one in found}) <= _MOST_MEANINGS:
                return found
    return []


def table() -> str:
    """Return `PEER_TABLE` as a markdown table."""
    lines = [f"| {' | '.join(FRAMEWORKS)} | here | conversion |", "|---|" + "---|" * (len(FRAMEWORKS) + 1)]
    for row in PEER_TABLE:
        names = (_code(row.names.get(framework, ())) for framework in FRAMEWORKS)
        lines.append(f"| {' | '.join(names)} | {_code(row.ours) or 'none'} | {row.note} |")
    return "\n".join(lines)


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
    ends: dict[str, list[Found]] = {}
    for name, found in _whole().items():
        parts = name.split(".")
        for start in range(len(parts)):
            ends.setdefault(".".join(parts[start:]), []).extend(found)
    return ends


def _leaves(value: Any, prefix: str) -> Iterator[str]:
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
