"""Results appear whole or not at all, also after a power cut: contents reach the disk before their name."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_dist.errors import RunEnded, UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
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


def write_text(path: Path, text: str) -> None:
    """Atomic and durable: a reader finds the old file or the new one, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    publish(partial, path)


@contextmanager
def alone(directory: Path, what: str) -> Iterator[None]:
    """Within, no other process is in such a block of ``directory``. Raises UserError where one is: it is
    ``what``. The kernel gives the lock back when the process ends, however it ends.
    """
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{directory}: another process is {what}") from error
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
