"""Start a run's private Ray cluster, and keep it closed to other users of the machine.

Ray writes its token with the permissions that new files of the user have, mostly readable by all, and makes
its directories writable by all.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir

from actors.placement.own_gpus import EMPTIED, NOT_SET
from grpo_dist.errors import UserError
from grpo_dist.runtime.stage_log import print_line

logger = logging.getLogger("grpo_dist")
T = TypeVar("T")

_TRIES = 5
# Ray's own processes read these when they start. In a private cluster nobody reads what they switch off:
# lines of logs for a driver, and the load of each process for a dashboard.
_NOT_COLLECTED = {
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "inf",
    "REPORTER_UPDATE_INTERVAL_MS": "86400000",
}
# They change which GPUs an actor sees: see `own_gpus`.
_NOT_INHERITED = (NOT_SET, EMPTIED)
# A path of a socket has 107 bytes at most; those behind Ray's temporary directory are
# /session_2026-11-28_13-46-32_123456_1234567/sockets/plasma_store, and of vLLM's engines and of Python's
# multiprocessing fewer.
_LONGEST = 107 - 63 - 1
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")
_ENGINES = "VLLM_RPC_BASE_PATH"  # vLLM's sockets; default: TMPDIR
_SPILLING = "RAY_object_spilling_directory"
_TOO_SLOW = "timed out during startup"  # in an error that is a plain Exception


def start(**options: Any) -> None:
    """Start a private Ray for this process, with ``options`` of `ray.init`. Variables by which its actors
    would see other GPUs than their own leave the environment, which Ray's processes inherit.
    """
    for name, value in _NOT_COLLECTED.items():
        os.environ.setdefault(name, value)
    for name in _NOT_INHERITED:
        os.environ.pop(name, None)
    options = _short_paths() | options
    started_in_time(lambda: ray.init(address="local", log_to_driver=False, **options))


def _short_paths() -> dict[str, str]:
    """Return options of `ray.init` that keep the paths of its sockets, and of engines, short where TMPDIR is
    long, as Slurm sets it. Objects that do not fit into memory are still written to TMPDIR. Raises UserError
    where no directory with a short name can be written.
    """
    wanted = Path(get_default_ray_temp_dir())
    if len(os.fsencode(wanted)) <= _LONGEST:
        return {}
    short = next((path for path in _SHORT if os.access(path, os.W_OK | os.X_OK)), None)
    if short is None:
        raise UserError(
            f"TMPDIR (or RAY_TMPDIR) = {wanted.parent}: Ray's sockets are below it, and their paths are "
            f"longer than 107 bytes; set RAY_TMPDIR to a directory of at most {_LONGEST - len('/ray')} "
            "characters"
        )
    os.environ.setdefault(_ENGINES, short)
    print_line(f"Ray's sockets and logs are in {short}/ray: the path of {wanted.parent} is too long for them")
    options = {"_temp_dir": f"{short}/ray"}
    if _SPILLING not in os.environ:
        options["object_spilling_directory"] = str(wanted)
    return options


def started_in_time(start_ray: Callable[[], T]) -> T:
    """Return ``start_ray()``.

    Ray gives its own processes 30 s, which they may exceed on a busy machine. Then they are started again.
    """
    before = set(psutil.Process().children())
    for tries_left in reversed(range(_TRIES)):
        try:
            return start_ray()
        except Exception as error:
            if _TOO_SLOW not in str(error) or not tries_left:
                raise
        logger.warning("Ray's processes did not start within its limit; they are started again")
        for process in set(psutil.Process().children()) - before:
            process.kill()
    raise AssertionError("the last try returns or raises")


def prepare_token() -> None:
    """Write a token to the file where Ray looks for one, readable by this user alone.

    An existing token is kept, and made unreadable to others.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    if given := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        _warn_if_open(Path(given))
        return
    path = Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        _close_to_others(path, 0o600)
        return
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))


def close_session(session: Path) -> None:
    """Keep others from entering the directory of a started session, and from renaming it in the shared
    one.
    """
    _close_to_others(session, 0o700)
    with suppress(OSError):
        shared = session.parent.stat()
        if shared.st_uid == os.getuid() and shared.st_mode & stat.S_IWOTH:
            session.parent.chmod(stat.S_IMODE(shared.st_mode) | stat.S_ISVTX)
        elif shared.st_uid not in (0, os.getuid()) and not shared.st_mode & stat.S_ISVTX:
            logger.warning(
                "%s belongs to another user, who can replace what Ray keeps there; set RAY_TMPDIR to a "
                "directory of your own",
                session.parent,
            )


def _close_to_others(path: Path, mode: int) -> None:
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(mode)
    except OSError as error:
        logger.warning("%s can be read by others, and cannot be changed (%s); chmod it", path, error.strerror)


def _warn_if_open(path: Path) -> None:
    with suppress(OSError):
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            logger.warning("RAY_AUTH_TOKEN_PATH = %s can be read by others; chmod 600 it", path)
