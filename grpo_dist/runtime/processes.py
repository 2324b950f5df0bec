"""Child processes: their command and import path, memory limit, imports of large libraries, and killing a
process together with every process that its code has started.

    pool --lifeline, SIGTERM--> guardian --> grader --> what user code starts
                                    ^                        |  setsid, double fork
                                    +---- becomes its child -+

The guardian is a child subreaper: a process whose parent ends becomes its child, even in another session. It
waits until the grader exits, SIGTERM arrives or the pool's process ends; then it kills all of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_dist.errors import expanded
from grpo_dist.runtime.stage_log import stage

SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
_KILL_S = 5.0  # limit for finding new descendants, and for waiting until they end
_WAKE_MS = 60_000
_ROOT = Path(__file__).resolve().parents[2]
# The child imports the same grpo_dist as this process, whatever its code paths contain. That directory, which
# may be the working directory, is then removed from the path; -P excludes the working directory.
_CHILD = (
    "import sys; sys.path.insert(0, sys.argv.pop()); import {module} as child; del sys.path[0]; child.main()"
)


def fork_guarded(lifeline: int) -> None:
    """Fork and return in the child, which leads a new process group.

    The parent becomes the guardian. It exits with the child's status, or with 0 after SIGTERM.

    Args:
        lifeline: read end of a pipe whose other end only the pool's process holds.
    """
    become_subreaper()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    # A stopped guardian (SIGSTOP) continues when the pool's process ends, and kills its descendants. Set
    # before the fork, because the guardian may be stopped as soon as the grader answers.
    process_option(SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)
    guardian = os.getpid()
    grader = os.fork()
    if grader == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.close(wake)
        os.close(woken)
        os.setpgid(0, 0)
        process_option(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        return
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # only the grader uses its pipes
        os.dup2(devnull, descriptor)
    _exit_with(_wait(grader, lifeline, wake, stop_signals))


def kill_descendants(root: int, *, proc: str = "/proc") -> None:
    """Send SIGKILL to all descendants of ``root``. Stops them first, so that none can fork."""
    stopped: set[int] = set()
    end = time.monotonic() + _KILL_S
    while time.monotonic() < end and (new := descendants(root, proc=proc) - stopped):
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Send SIGKILL to all processes with ``mark`` (``NAME=value``) in their initial environment."""
    entry, marked = mark.encode(), set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if entry in environment.read_bytes().split(b"\0"):
                marked.add(int(environment.parent.name))
    _signal(marked - {os.getpid()}, signal.SIGKILL)


def _wait(grader: int, lifeline: int, wake: int, stop_signals: list[int]) -> int:
    """Wait for the end, then kill all descendants. Returns the grader's wait status, or 0 after SIGTERM."""
    poller = select.poll()
    poller.register(lifeline, 0)  # only its hang-up
    poller.register(wake, select.POLLIN)
    status: int | None = None
    while status is None and not stop_signals:
        ready = poller.poll(_WAKE_MS)
        if any(descriptor == lifeline for descriptor, _ in ready):
            break
        if ready:
            os.read(wake, 4096)
        status = reap().get(grader)
    kill_descendants(os.getpid())
    end = time.monotonic() + _KILL_S
    while descendants(os.getpid()) and time.monotonic() < end:
        reap()
        time.sleep(0.002)
    return status or 0


def become_subreaper() -> None:
    """Adopt descendants whose parent ends, even in another session."""
    process_option(_SET_CHILD_SUBREAPER, 1)


def reap() -> dict[int, int]:
    """Reap ended children. Returns their wait statuses by process id."""
    statuses = {}
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[child[0]] = child[1]
    return statuses


def _exit_with(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def descendants(root: int, *, proc: str = "/proc") -> set[int]:
    """Return the ids of all descendants of ``root``, from the file system mounted at ``proc``."""
    try:
        return _listed_descendants(root, proc)
    except FileNotFoundError:  # a kernel without these lists, or ``root`` has ended
        pass
    children: dict[int, list[int]] = {}
    for stat in Path(proc).glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pids, below = set(), list(children.get(root, ()))
    while below:
        pid = below.pop()
        if pid not in pids:
            pids.add(pid)
            below += children.get(pid, ())
    return pids


def _listed_descendants(root: int, proc: str) -> set[int]:
    """Return `descendants` from the kernel's lists of children; the cost does not grow with the machine."""
    pids: set[int] = set()
    below = _children(root, proc)
    while below:
        pid = below.pop()
        if pid not in pids:
            pids.add(pid)
            with suppress(FileNotFoundError, ProcessLookupError):
                below += _children(pid, proc)
    return pids


def _children(pid: int, proc: str) -> list[int]:
    lists = []
    for thread in os.listdir(f"{proc}/{pid}/task"):
        with open(f"{proc}/{pid}/task/{thread}/children") as file:
            lists.append(file.read())
    return [int(child) for child in " ".join(lists).split()]


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def process_option(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def die_with(lifeline: int) -> None:
    """Make the kernel send SIGKILL to this process group when the other end of the pipe ``lifeline`` closes,
    as when its process ends.

    This also ends a process that is busy in C and never returns to Python, as in 9**9**9. (prctl's death
    signal is sent when the parent *thread* ends.)
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def used_address_space() -> int:
    """Return this process's address space, bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def limit_address_space(megabytes: int | None, used: int | None = None) -> None:
    """Limit the address space to ``used``, by default its current size, plus ``megabytes``; None for
    ``megabytes`` restores the system's limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard
    if megabytes is not None:
        limit = (used_address_space() if used is None else used) + megabytes * 2**20
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def child_command(module: str, *arguments: object, python: str | None = None) -> list[str]:
    """Return the command that calls ``main()`` of a module of this package, with ``arguments`` in sys.argv.
    ``python``: the interpreter; None: this one.
    """
    code = _CHILD.format(module=module)
    return [python or sys.executable, "-P", "-c", code, *map(str, arguments), str(_ROOT)]


async def run_child(module: str, *arguments: object, deadline_s: float) -> tuple[int, bytes, str]:
    """Run ``main()`` of a module in a child process, see `child_command`; kill it when cancelled.

    Returns its exit status, standard output and standard error. Raises TimeoutError at the deadline.
    """
    import asyncio  # slow to import, and every command imports this file

    process = await asyncio.create_subprocess_exec(
        *child_command(module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(deadline_s):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None, "communicate returned before the process had ended"
    return process.returncode, output, errors.decode(errors="replace")


def code_directories(key: str, paths: Sequence[str], what: str) -> list[str]:
    """Return the directories that the configuration names under ``key``. Raises ValueError for a missing one.
    ``what``: describes their modules.
    """
    directories = [expanded(path).resolve() for path in paths]
    for path, directory in zip(paths, directories, strict=True):
        if not directory.is_dir():
            raise ValueError(
                f"{key}: {path!r} is not a directory (resolved to {directory}); expected directories with "
                f"modules of {what}"
            )
    return list(map(str, directories))


def python_path(directories: Sequence[str]) -> str:
    """Return this process's PYTHONPATH with ``directories`` prepended."""
    # An empty entry, as in "a::b" or "a:", would mean the working directory.
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([*directories, *inherited])


@contextmanager
def libraries_loaded() -> Iterator[None]:
    """Log the imports of the block as the stage `libraries`. They take seconds, more on a busy machine."""
    with stage("libraries", "are loaded"), pause_garbage_collection():
        yield


@contextmanager
def pause_garbage_collection(*, freeze: bool = True) -> Iterator[None]:
    """Disable the garbage collector while a new process imports libraries, then exclude the existing objects
    from later collections: torch and vLLM make a million objects, nearly all permanent. ``freeze`` False: for
    a command that is about to end; libraries would report frozen objects as leaked.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        if freeze:
            gc.freeze()
    finally:
        gc.enable()


def freeze_loaded() -> None:
    """Exclude all current objects from later garbage collections, once a worker has loaded everything. A full
    collection visits half a million objects of torch, transformers and DeepSpeed, in 0.3 to 0.6 s.
    """
    gc.collect()  # frozen garbage would never be freed
    gc.freeze()
