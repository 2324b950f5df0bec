"""Sandbox of the job: a small disk that can fill up, and a /dev/shm that holds only the job's files.

Both are mounted in a namespace of this process and its children, and vanish with the last of them.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # flags of unshare(2)
_PRIVATE = (1 << 14) | (1 << 18)  # MS_REC | MS_PRIVATE
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Sandbox:
    """``disk`` holds the job's runs. ``refusal``: why disk and /dev/shm are shared; None: both private."""

    disk: Path
    refusal: str | None


def enter(disk: Path, *, disk_mb: int) -> Sandbox:
    """Mount the sandbox. Call it before threads start, as the user namespace of a non-root user requires."""
    disk.mkdir(parents=True)
    try:
        _unshare()
        _mount("none", Path("/"), None, _PRIVATE)
        _mount("tmpfs", disk, f"size={disk_mb}m")
        _mount("tmpfs", SHARED_MEMORY, "mode=1777")
    except OSError as error:
        return Sandbox(disk, f"private mounts are not permitted here ({error})")
    return Sandbox(disk, None)


def leave(disk: Path) -> None:
    """Unmount ``disk`` if it was mounted, so that its directory can be removed."""
    with suppress(OSError):
        _call("umount", _text(str(disk)))


def fill(disk: Path) -> None:
    """Fill ``disk`` to the last byte."""
    with _filler(disk).open("wb", buffering=0) as file:
        block = b"\0" * 2**20
        while len(block):
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]


def free(disk: Path) -> None:
    """Undo `fill`."""
    _filler(disk).unlink(missing_ok=True)


def _filler(disk: Path) -> Path:
    return disk / "filler"


def _unshare() -> None:
    uid, gid = os.getuid(), os.getgid()
    try:
        _call("unshare", _NEW_MOUNTS)
    except PermissionError:
        _call("unshare", _NEW_USER | _NEW_MOUNTS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _mount(source: str, target: Path, options: str | None, flags: int = 0) -> None:
    kind = source if source == "tmpfs" else None
    _call("mount", _text(source), _text(str(target)), _text(kind), ctypes.c_ulong(flags), _text(options))


def _text(text: str | None) -> ctypes.c_char_p:
    return ctypes.c_char_p(text.encode() if text is not None else None)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
