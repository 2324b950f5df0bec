"""Ends a process together with every process that its code has started: of a grader, by its parent.

    pool --lifeline, SIGTERM--> guardian --> grader --> what user code starts
                                    ^                        |  setsid, double fork
                                    +---- becomes its child -+

The guardian is a child subreaper: a process whose parent ends becomes its child, even in its own session. It
waits until the grader exits, SIGTERM arrives or the pool's process ends; then it kills all of them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_KILL_S = 5.0  # limit for finding new descendants and for waiting for their end
_WAKE_MS = 60_000


def fork_guarded(lifeline: int) -> None:
    """Fork and return in the child, which leads a new process group.

    The parent becomes the guardian. It exits with the child's status, or with 0 after SIGTERM.

    Args:
        lifeline: read end of a pipe whose other end only the pool's process holds.
    """
    become_subreaper()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    # A stopped guardian (SIGSTOP) continues when the pool's process ends, and kills all below it. This is set
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
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # only the grader uses its pipes
        os.dup2(nothing, descriptor)
    _exit_as(_wait(grader, lifeline, wake, asked))


def kill_descendants(root: int, *, proc: str = "/proc") -> None:
    """Send SIGKILL to all descendants of ``root``. They are stopped first, so that none can fork."""
    stopped: set[int] = set()
    end = time.monotonic() + _KILL_S
    while time.monotonic() < end and (new := descendants(root, proc=proc) - stopped):
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Send SIGKILL to all processes with ``mark``, as ``NAME=value``, in their initial environment."""
    wanted, found = mark.encode(), set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in environment.read_bytes().split(b"\0"):
                found.add(int(environment.parent.name))
    _signal(found - {os.getpid()}, signal.SIGKILL)


def _wait(grader: int, lifeline: int, wake: int, asked: list[int]) -> int:
    """Wait for the end and kill all descendants. Returns the grader's wait status, 0 after SIGTERM."""
    poller = select.poll()
    poller.register(lifeline, 0)  # only its hang-up
    poller.register(wake, select.POLLIN)
    status: int | None = None
    while status is None and not asked:
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
    """Adopt descendants whose parent ends, also those in their own session."""
    process_option(_SET_CHILD_SUBREAPER, 1)


def reap() -> dict[int, int]:
    """Reap children that have ended. Returns their wait statuses by process id."""
    found = {}
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def _exit_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def descendants(root: int, *, proc: str = "/proc") -> set[int]:
    """Return the ids of all processes below ``root``, as the file system mounted at ``proc`` has them."""
    try:
        return _listed_descendants(root, proc)
    except FileNotFoundError:  # a kernel without these lists, or ``root`` has ended
        pass
    children: dict[int, list[int]] = {}
    for stat in Path(proc).glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, below = set(), list(children.get(root, ()))
    while below:
        pid = below.pop()
        if pid not in found:
            found.add(pid)
            below += children.get(pid, ())
    return found


def _listed_descendants(root: int, proc: str) -> set[int]:
    """Like `descendants`, by the kernel's lists of children; the cost does not grow with the machine."""
    found: set[int] = set()
    below = _children(root, proc)
    while below:
        pid = below.pop()
        if pid not in found:
            found.add(pid)
            with suppress(FileNotFoundError, ProcessLookupError):
                below += _children(pid, proc)
    return found


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
    """Have the kernel send SIGKILL to this process group when the other end of the pipe ``lifeline`` closes,
    as it does when the process that holds it ends.

    It also ends a process that is busy in C and never returns to Python, as in 9**9**9. (The death signal of
    prctl is sent when the parent *thread* ends.)
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
