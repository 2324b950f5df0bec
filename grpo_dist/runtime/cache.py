"""A disk cache of models this project makes, keyed by everything that determines them, and the check that a
node has a model's directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_dist.runtime.files import publish


def cache_dir() -> Path:
    """Return ``GRPO_DIST_CACHE``, or ~/.cache/grpo-dist where that is not set."""
    return Path(os.environ.get("GRPO_DIST_CACHE") or Path.home() / ".cache" / "grpo-dist")


def cached(label: str, decides: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """Return the directory that ``make`` filled for this ``decides``, calling it only the first time. The
    directory is complete or absent, whenever the process dies.
    """
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    final = cache_dir() / f"{label}-{digest}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        make(partial)
        try:
            publish(partial, final)
        except OSError:
            if not final.is_dir():  # another process has made the same one meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def check_on_node(model_dir: str | Path) -> None:
    """Raise ValueError where this node does not have ``model_dir``, which the driver has on its own."""
    if Path(model_dir).is_dir():
        return
    caches = ("HF_HOME", "GRPO_DIST_CACHE")
    here = ", ".join(f"{name}={os.environ.get(name) or 'not set'}" for name in caches)
    raise ValueError(
        f"model directory {model_dir}: node {platform.node()} does not have it, and the driver does; put it "
        "on storage that all nodes see, or set HF_HOME (downloads) and GRPO_DIST_CACHE (models made here) to "
        f"directories there, for the driver and all nodes (this one has {here})"
    )


def fingerprint(path: Path) -> str:
    """Hash a file by its contents, a directory by the names, sizes and times of its files."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(p for p in path.rglob("*") if p.is_file())
    entries = [(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
