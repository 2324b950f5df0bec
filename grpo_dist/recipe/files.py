"""Files of a recipe: written whole or not at all, and never deleted."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.durable import publish


def write_text(path: Path, text: str) -> None:
    """Atomic and durable: a reader finds the old file or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


def move_aside(path: Path) -> Path:
    """Rename ``path`` to the first free ``path.old-1``, ``path.old-2`` ...; returns where it is now."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside
