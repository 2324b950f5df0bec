"""What a finished directory holds, to the byte: so that one that was torn or changed afterwards is told."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"
_BLOCK = 1 << 22
_THREADS = 8  # hashing leaves Python's lock alone


def write_manifest(directory: Path) -> None:
    """Size and BLAKE2b of every file below, in ``directory``/manifest.json."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_digest, files))
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(files, digests, strict=True)
    }
    (directory / MANIFEST).write_text(json.dumps({"files": listed}, indent=1))


def find_damage(directory: Path) -> str | None:
    """The first file that is not as the manifest says, in words; None: all are."""
    try:
        listed = json.loads((directory / MANIFEST).read_text())["files"]
        expected = [(directory / name, entry["bytes"], entry["blake2b"]) for name, entry in listed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    # Sizes first: they cost nothing, and a torn file is mostly a short one.
    for path, size, _ in expected:
        if not path.is_file():
            return f"{path.relative_to(directory)} is missing"
        if path.stat().st_size != size:
            return f"{path.relative_to(directory)} has {path.stat().st_size} bytes instead of {size}"
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(lambda item: _differs(item[0], item[2]), expected)
        return next((f"{path.relative_to(directory)} {why}" for path, why in checked if why), None)


def _differs(path: Path, digest: str) -> tuple[Path, str | None]:
    try:
        return path, None if _digest(path) == digest else "was changed: its checksum is another"
    except OSError as error:
        return path, f"cannot be read ({error})"


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
