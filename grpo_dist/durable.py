"""Results appear whole or not at all, also after a power cut: contents reach the disk before their name."""

from __future__ import annotations

import os
from pathlib import Path


def publish(partial: Path, final: Path) -> None:
    """Give the finished file or directory ``partial`` its name. A file replaces one of that name."""
    flush(partial)
    os.replace(partial, final)
    _flush(final.parent)


def flush(path: Path) -> None:
    """fsync a file, or a directory and everything below."""
    for inner in (*path.rglob("*"), path):
        _flush(inner)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
