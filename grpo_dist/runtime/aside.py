"""What is made anew does not delete what was there."""

from __future__ import annotations

from pathlib import Path


def move_aside(path: Path) -> Path:
    """Rename ``path`` to the first free ``path.old-1``, ``path.old-2`` ...; returns where it is now."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside
