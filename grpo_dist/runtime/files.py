"""Files that appear complete or not at all, also after a power cut, backups, and locks on directories.

Contents reach the disk before their name does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from grpo_dist.errors import RERUN, RunEnded, UserError

LOCK = ".lock"
# Errors of network file systems without locks. EBADF: a directory, which cannot be opened for writing.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN_S = 0.1
_FULL_BYTES = 2**20  # less free space than this counts as full


class DiskFull(RunEnded):
    """The disk of a run directory is full."""


def check_room(directory: Path, error: BaseException) -> None:
    """Raise DiskFull in place of ``error``, which ended a run in ``directory``, when that disk is full. Not
    every writer reports it: torch complains about an unexpected position in its file.
    """
    reported = getattr(error, "errno", None) in _FULL
    if reported or shutil.disk_usage(directory).free < _FULL_BYTES:
        raise DiskFull(
            f"{directory}: No space left on device ({type(error).__name__}); free some there, and {RERUN}"
        ) from error


def check_replaceable(path: Path) -> None:
    """Raise UserError for a device, FIFO or socket, or a link to one: a file would take its place."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: a device, FIFO or socket, which a file would replace; name another file")


def publish(partial: Path, final: Path) -> None:
    """Flush the finished file or directory ``partial`` and rename it to ``final``. A file replaces one
    there. Raises as `check_replaceable`.
    """
    check_replaceable(final)
    flush(partial)
    os.replace(partial, final)
    _flush(final.parent)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically. Returns False, with nothing done, where the file system cannot."""
    flush(one)
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(_HERE, bytes(one.absolute()), _HERE, bytes(other.absolute()), _EXCHANGE) == 0:
        _flush(other.parent)
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a reader finds the old file or the new one, also after a
    crash. Raises as `check_replaceable`.
    """
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with open_new(partial) as file:
        file.write(text)
    publish(partial, path)


def open_new(path: Path) -> IO[str]:
    """Open a new text file for writing. Whatever is at ``path`` is removed first, never written through: it
    may be a link to any other file.
    """
    clear(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    return open(descriptor, "w", encoding="utf-8")


def clear(path: Path) -> None:
    """Remove the file, directory or link at ``path``, if there is one. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def keep_backup(path: Path) -> Path:
    """Rename ``path`` to the first free ``path.old-1``, ``path.old-2`` ..., and return the new path."""
    number = 1
    # A link to nothing takes a name, too: a rename would replace it.
    while os.path.lexists(backup := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    path.rename(backup)
    return backup


@contextmanager
def alone(directory: Path, what: str, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of ``directory`` for the length of the block.

    Raises UserError where another process still holds it after ``patience_s``; ``what`` names what that
    process does. The kernel releases the locks when the process ends, however it ends.

    Both the directory and the file `.lock` in it are locked. The file can be deleted, and then a lock on it
    excludes no other process; the directory cannot be locked on some network file systems.
    """
    end = time.monotonic() + patience_s
    while not (descriptors := _locks(directory)):
        if time.monotonic() >= end:
            raise UserError(f"{directory}: another process is {what}")
        time.sleep(_AGAIN_S)
    try:
        yield
    finally:
        _close(descriptors)


def _locks(directory: Path) -> list[int]:
    """Return the descriptors that hold both locks; none where another process holds one, or has just replaced
    what it locked.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptors: list[int] = []
    try:
        for path, opened in ((directory, _open_directory), (directory / LOCK, _open_lock)):
            descriptors.append(opened(path))
            if not _locked(descriptors[-1]) or not _is_at(path, descriptors[-1]):
                break
        else:
            return descriptors
    except BaseException:
        _close(descriptors)
        raise
    _close(descriptors)
    return []


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)


def _open_lock(path: Path) -> int:
    """Open the lock file without truncating it: a link put in its place must not empty another file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path}: a symbolic link, where a lock file is expected; remove it") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: not a regular file, where a lock file is expected; remove it")
    return descriptor


def _locked(descriptor: int) -> bool:
    """Try to lock ``descriptor``; true also where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def flush(path: Path) -> None:
    """Call fsync on a file, or on a directory and everything below it."""
    for inner in (*path.rglob("*"), path):
        _flush(inner)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
