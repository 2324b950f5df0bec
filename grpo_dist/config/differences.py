"""Describe differences between two sets of settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def changes(old: Any, new: Any) -> list[str]:
    """Return one item per changed key of nested mappings and lists: "`steps` was 40 and is 60"."""
    before, after = flat(old), flat(new)
    return [
        f"`{key}` was {before.get(key)} and is {after.get(key)}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def flat(value: Any) -> dict[str, Any]:
    """Flatten ``{"a": {"b": 1}, "c": [{"d": 2}]}`` to ``{"a.b": 1, "c.0.d": 2}``; keep empty containers."""
    return dict(_entries(value))


def drop(tree: Any, path: Sequence[str]) -> Any:
    """Return ``tree`` without the entry at ``path``. "*" stands for each entry of a list or a mapping."""
    name, *rest = path
    if name == "*" and isinstance(tree, list):
        return [drop(inner, rest) for inner in tree]
    if name == "*" and isinstance(tree, dict):
        return {key: drop(inner, rest) for key, inner in tree.items()}
    if not isinstance(tree, dict) or name not in tree:
        return tree
    if rest:
        return tree | {name: drop(tree[name], rest)}
    return {key: value for key, value in tree.items() if key != name}


def has_place(key: str, settings: Mapping[str, Any]) -> bool:
    """Return whether flat ``settings`` have ``key``, or a value such as null for one of its parents.
    Otherwise a later version added the key.
    """
    parts = key.split(".")
    return any(".".join(parts[:end]) in settings for end in range(1, len(parts) + 1))


def listed(items: Sequence[str]) -> str:
    """Join four items and the number of the other items: ``a, b, c, d, 2 more``"""
    return ", ".join([*items[:4], *([f"{len(items) - 4} more"] if len(items) > 4 else [])])


def _entries(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _entries(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
