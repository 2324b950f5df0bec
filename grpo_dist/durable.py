"""Results appear whole or not at all, also after a power cut: contents reach the disk before their name."""

from __future__ import annotations

import os
from pathlib import Path


def publish(partial: Path, final: Path) -> None:
    """Give the finished file or directory ``partial`` its name. A file replaces one of that name."""
    flush(partial)
    os.replace(partial, final)
    _flush(final.parent)


def write_text(path: Path, text: str) -> None:
    """Atomic and durable: a reader finds the old file or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


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
