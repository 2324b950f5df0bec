"""Results appear whole or not at all, also after a power cut: contents reach the disk before their name."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_dist.errors import RunEnded, UserError

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of some network file systems: then nobody is told
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN_S = 0.1
_FULL_BYTES = 2**20  # what a writer leaves free that was refused more


class DiskFull(RunEnded):
    """Nothing more can be written to the directory of a run."""


def check_room(directory: Path, error: BaseException) -> None:
    """Raises DiskFull in place of ``error``, which ended a run in ``directory``, when that has no room left.
    Not all who write say so: torch reports an unexpected position in its file.
    """
    said = getattr(error, "errno", None) in _FULL
    if said or shutil.disk_usage(directory).free < _FULL_BYTES:
        raise DiskFull(
            f"{directory}: No space left on device ({type(error).__name__}); make room there and start the "
            "same command again, which goes on from the last checkpoint"
        ) from error


def publish(partial: Path, final: Path) -> None:
    """Give the finished file or directory ``partial`` its name. A file replaces one of that name."""
    flush(partial)
    os.replace(partial, final)
    _flush(final.parent)


def exchange(one: Path, other: Path) -> bool:
    """Each gets the name of the other, at once. False: this file system cannot, and nothing was done."""
    flush(one)
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(_HERE, bytes(one.absolute()), _HERE, bytes(other.absolute()), _EXCHANGE) == 0:
        _flush(other.parent)
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def write_text(path: Path, text: str) -> None:
    """Atomic and durable: a reader finds the old file or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


@contextmanager
def alone(directory: Path, what: str, *, patience_s: float = 0.0) -> Iterator[None]:
    """Within, no other process is in such a block of ``directory``. Raises UserError where one still is after
    ``patience_s``: it is ``what``. The kernel gives the lock back when the process ends, however it ends.
    """
    end = time.monotonic() + patience_s
    with (directory / LOCK).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise UserError(f"{directory}: another process is {what}") from error
                time.sleep(_AGAIN_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        yield


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
