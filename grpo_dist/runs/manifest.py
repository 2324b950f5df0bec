"""Sizes and checksums of a finished directory, to detect files that were cut off or changed afterwards."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Any

MANIFEST = "manifest.json"
_BLOCK = 1 << 22
_LARGEST = 64 * 2**20  # bytes of a manifest, more than any run writes
_THREADS = 8  # hashing releases the GIL


def write_manifest(directory: Path) -> None:
    """Write size and BLAKE2b of every file below ``directory`` to its manifest.json."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_digest, files))
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(files, digests, strict=True)
    }
    (directory / MANIFEST).write_text(json.dumps({"files": listed}, indent=1))


def find_damage(directory: Path, *, must_have: Sequence[str] = ()) -> str | None:
    """Describe the first file that differs from the manifest; None where all match. Never raises and never
    blocks, whatever the directory holds. ``must_have``: files that a manifest must list.
    """
    try:
        listed = json.loads(_text(directory / MANIFEST))["files"]
        expected = [(name, entry["bytes"], entry["blake2b"]) for name, entry in listed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    names = {name for name, _, _ in expected}
    if missing := [name for name in must_have if name not in names] or ([] if names else ["any file"]):
        return f"{MANIFEST} does not list {missing[0]}"
    # Sizes first: they cost nothing, and most damaged files are short.
    for name, size, _ in expected:
        if problem := _misses(directory, name, size):
            return f"{json.dumps(name)[1:-1]} {problem}"
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(lambda item: (item[0], _differs(directory / item[0], item[2])), expected)
        return next((f"{json.dumps(name)[1:-1]} {why}" for name, why in checked if why), None)


def _text(path: Path) -> str:
    """Read a regular file of limited size. Raises OSError or ValueError for any other."""
    with _open(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST:
            raise ValueError(f"it has {size} bytes")
        return file.read().decode()


def _open(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError for anything but a regular file, and never blocks on a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return open(descriptor, "rb")


def _misses(directory: Path, name: str, size: Any) -> str | None:
    """Describe how the file differs from its entry, apart from its contents; None where it does not."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return "is listed, but lies outside the directory"
    try:
        found = (directory / name).stat()
    except (OSError, ValueError):  # the latter for a name that no file can have
        return "is missing"
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    return None if found.st_size == size else f"has {found.st_size} bytes instead of {size}"


def _differs(path: Path, digest: Any) -> str | None:
    try:
        return None if _digest(path) == digest else "has changed: its checksum differs"
    except OSError as error:
        return f"cannot be read ({error})"


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with _open(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
