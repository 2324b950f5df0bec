"""Atomic file writes that survive a power cut, backups, and locks on directories; JSON files, files with one
JSON object per step, and generated parts of documents.

Contents reach the disk before their name does. Readers handle damaged files.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from grpo_dist.errors import RERUN, RunEnded, UserError

LOCK = ".lock"
# Errors of network file systems without locks. EBADF: a directory cannot be opened for writing.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN_S = 0.1
_FULL_BYTES = 2**20  # less free space than this counts as full


class DiskFull(RunEnded):
    """The disk of a run directory is full."""


def check_room(directory: Path, error: BaseException) -> None:
    """Raise DiskFull instead of ``error``, which ended a run in ``directory``, if that disk is full. Not
    every writer reports this: torch complains about an unexpected position in its file.
    """
    reported = getattr(error, "errno", None) in _FULL
    if reported or shutil.disk_usage(directory).free < _FULL_BYTES:
        raise DiskFull(
            f"{directory}: No space left on device ({type(error).__name__}); free some there, and {RERUN}"
        ) from error


def check_replaceable(path: Path) -> None:
    """Raise UserError for a device, FIFO or socket, or a link to one: a file would replace it."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path}: a device, FIFO or socket, which a file would replace; name another file")


def publish(partial: Path, final: Path) -> None:
    """Flush the finished file or directory ``partial`` and rename it to ``final``; a file replaces an
    existing one. Raises like `check_replaceable`.
    """
    check_replaceable(final)
    flush(partial)
    os.replace(partial, final)
    _flush(final.parent)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically. Returns False, with nothing done, if the file system cannot."""
    flush(one)
    renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    if renameat2(_HERE, bytes(one.absolute()), _HERE, bytes(other.absolute()), _EXCHANGE) == 0:
        _flush(other.parent)
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a reader finds the old file or the new one, even after a crash.
    Raises like `check_replaceable`.
    """
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with open_new(partial) as file:
        file.write(text)
    publish(partial, path)


def open_new(path: Path) -> IO[str]:
    """Open a new text file for writing. Removes an existing ``path`` first, as it may be a link to another
    file, which must not be overwritten.
    """
    clear(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    return open(descriptor, "w", encoding="utf-8")


def clear(path: Path) -> None:
    """Remove the file, directory or link at ``path``, if any. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def keep_backup(path: Path) -> Path:
    """Rename ``path`` to the first free ``path.old-1``, ``path.old-2`` ...; return the new path."""
    number = 1
    # A dangling link occupies a name, too: a rename would replace it.
    while os.path.lexists(backup := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    path.rename(backup)
    return backup


@contextmanager
def alone(directory: Path, what: str, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of ``directory`` during the block.

    Raises UserError if another process still holds it after ``patience_s``; ``what`` describes that process's
    work. The kernel releases the locks when the process ends, however it ends.

    Locks both the directory and its file `.lock`: the file can be deleted, and then a lock on it excludes no
    other process; some network file systems cannot lock the directory.
    """
    end = time.monotonic() + patience_s
    while not (descriptors := _acquire_locks(directory)):
        if time.monotonic() >= end:
            raise UserError(f"{directory}: another process is {what}")
        time.sleep(_AGAIN_S)
    try:
        yield
    finally:
        _close(descriptors)


def _acquire_locks(directory: Path) -> list[int]:
    """Return the descriptors that hold both locks; [] if another process holds one, or has just replaced a
    locked path.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptors: list[int] = []
    try:
        for path, open_path in ((directory, _open_directory), (directory / LOCK, _open_lock)):
            descriptors.append(open_path(path))
            if not _try_lock(descriptors[-1]) or not _is_at(path, descriptors[-1]):
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
    """Open the lock file without truncating it: if it is a link, another file must not be emptied."""
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


def _try_lock(descriptor: int) -> bool:
    """Try to lock ``descriptor``; also True if the file system has no locks."""
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


def read_json(path: Path) -> Any:
    """Return the parsed contents of ``path``.

    Raises OSError for an unreadable file or one that is not regular (reading a pipe would never end), and
    ValueError for text that is not UTF-8 or not JSON, or is nested deeper than the parser's stack.
    """
    check_regular(path)
    return parse_json(path.read_bytes())


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device, which may be endless. Opening a directory fails anyway."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def parse_json(text: str | bytes) -> Any:
    """Return the parsed ``text``. Raises ValueError like `read_json`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def replace_nan(value: Any) -> Any:
    """Return a copy of nested mappings and lists with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: replace_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class StepLines:
    """A file with one line of JSON per step.

    Opening it drops the lines of steps after ``keep_through``: the resumed run rewrites them.
    """

    def __init__(self, path: Path, *, keep_through: int) -> None:
        self._path = path
        write_text(path, "".join(kept_lines(path, keep_through)))

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def kept_lines(path: Path, through: int) -> list[str]:
    """Return the lines of steps up to ``through``, without a last line that a kill truncated."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text.splitlines(keepends=True)
    return [line for line in lines if _is_step_up_to(line, through)]


def _is_step_up_to(line: str, last: int) -> bool:
    try:
        return line.endswith("\n") and parse_json(line)["step"] <= last
    except (ValueError, KeyError, TypeError):  # truncated by a kill
        return False


def record_to_dict(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with slots by name, without copying: `dataclasses.asdict` copies, and
    takes ten times as long.
    """
    return {name: getattr(record, name) for name in record.__slots__}


def replace_part(text: str, name: str, part: str) -> str:
    """Return ``text`` with ``part`` between the marks of ``name``. Raises ValueError if there are none."""
    begin, end = f"<!-- begin generated: {name} -->", f"<!-- end generated: {name} -->"
    before, marker, rest = text.partition(begin)
    _, end_marker, after = rest.partition(end)
    if not (marker and end_marker):
        raise ValueError(f"no marks {begin} ... {end}; put them where the generated part belongs")
    return f"{before}{begin}\n{part.strip()}\n{end}{after}"


def refresh(document: Path, name: str, part: str, *, arguments: Sequence[str]) -> int:
    """Write ``part`` into ``document``; with ``--check`` only compare. Returns the exit code: 1 if the check
    finds it out of date.
    """
    current = document.read_text()
    updated = replace_part(current, name, part)
    if "--check" in arguments:
        if current != updated:
            print(
                f"{document}: the generated part `{name}` is out of date; run `make reference` to update it"
            )
        return int(current != updated)
    document.write_text(updated)
    return 0
