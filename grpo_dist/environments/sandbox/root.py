"""A root directory with what Python needs, to read, and a directory of the episode's own; nothing else."""

from __future__ import annotations

import contextlib
import os
import secrets
import site
import sys
from collections.abc import Iterable

from grpo_dist.environments.sandbox.limits import MOST_FILES
from grpo_dist.environments.sandbox.linux import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    bind_read_only,
    change_root,
    mount,
)

HOME = "/tmp"  # the episode's directory in its own root; the same in all runs
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/etc/alternatives")
_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICES = tuple(f"/dev/{name}" for name in _DEVICES)
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}


def readable() -> list[str]:
    """Return the directories and files that Python and its packages are in, and the system's libraries.

    Checkouts that an editable installation or PYTHONPATH refers to are not among them.
    """
    own = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    user_site = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    if user_site in sys.path:
        own.append(user_site)
    paths = {path for path in (*_SYSTEM, *_FILES, *own) if os.path.exists(path)}
    return sorted(paths | {os.path.realpath(path) for path in paths})


def build_root(directory: str, user: int, files_mb: int | None, *, own_proc: bool) -> None:
    """Make a new root on ``directory`` and enter it. Needs a mount namespace of its own. Raises OSError."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in _outermost(readable()):
        target = directory + path
        if os.path.islink(path):
            _make_parents(target)
            os.symlink(os.readlink(path), target)
            continue
        _make(target, like=path)
        bind_read_only(path, target)
    os.makedirs(f"{directory}/dev", 0o755)
    for name in _DEVICES:
        _make(f"{directory}/dev/{name}", like=f"/dev/{name}")
        mount(f"/dev/{name}", f"{directory}/dev/{name}", None, MS_BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"{directory}/dev/{name}")
    os.symlink(HOME, f"{directory}/dev/shm")
    os.makedirs(f"{directory}/etc", 0o755, exist_ok=True)
    for name, line in (("passwd", f"user:x:{user}:{user}::{HOME}:/bin/sh\n"), ("group", f"user:x:{user}:\n")):
        with open(f"{directory}/etc/{name}", "w") as file:
            file.write(line)
        os.chmod(f"{directory}/etc/{name}", 0o644)
    os.mkdir(f"{directory}/proc", 0o755)
    if own_proc:
        mount("proc", f"{directory}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(directory + HOME)
    options = f"mode=700,uid={user},gid={user},nr_inodes={MOST_FILES}"
    if files_mb is not None:
        options += f",size={files_mb}m"
    mount("tmpfs", directory + HOME, "tmpfs", MS_NOSUID | MS_NODEV, options)
    change_root(directory)


def remove_tree(path: str) -> None:
    """Delete a directory with everything in it, at any depth and with any modes. Follows no links.

    Directories below are moved to the top one by one, so no path becomes long. No process may still use it.
    """
    with contextlib.suppress(FileNotFoundError):
        while entries := list(os.scandir(path)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for below in list(os.scandir(entry.path)):
                    if below.is_dir(follow_symlinks=False):
                        os.chmod(below.path, 0o700)
                        os.rename(below.path, f"{path}/{secrets.token_hex(16)}")
                    else:
                        os.unlink(below.path)
                os.rmdir(entry.path)
        os.rmdir(path)


def _outermost(paths: Iterable[str]) -> list[str]:
    """Drop paths inside others. ``["/usr", "/usr/local"] -> ["/usr"]``"""
    kept: list[str] = []
    for path in sorted(paths):
        if not any(path.startswith(f"{other}/") and not os.path.islink(other) for other in kept):
            kept.append(path)
    return kept


def _make(target: str, *, like: str) -> None:
    """Make an empty directory or file to mount on."""
    _make_parents(target)
    if os.path.isdir(like):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))


def _make_parents(target: str) -> None:
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
