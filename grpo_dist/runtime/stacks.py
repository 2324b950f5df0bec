"""Dump another process's stacks without its cooperation: it may be stopped, or in C code that holds the GIL.

    inspecting process           listening process
      /proc: is it stopped?
      a signal ----------------> handler in C: stacks of all threads --> memory of this process
      the stacks <-------------- read there through /proc

A process installs the handler once, at no further cost.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import fcntl
import gc
import os
import re
import selectors
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from textwrap import indent
from traceback import FrameSummary, StackSummary
from typing import IO, Any

import psutil

from grpo_dist.runtime.concurrency import gather

_SIGNAL = signal.SIGRTMIN + 8  # unused elsewhere: schedulers and libraries use SIGUSR1 and SIGUSR2
_REACT_S = 3.0  # a process runs signal handlers within microseconds, unless it is blocked in the kernel
_TURN_S = 2.0  # maximum wait for another process that inspects at the same time
_WHOLE_S = 3.5  # maximum time of a whole dump, for a process with little CPU time; 5.5 s in total
_POLL_S = 0.02
_FRAMES, _STACKS = 25, 8  # limits: innermost frames per stack, stacks per process


def listen() -> None:
    """Let other processes dump this process's stacks. Idempotent."""
    _listen(os.getpid())


@cache
def _listen(process: int) -> None:
    # Memory instead of a file, so that nothing can be left behind; it lives as long as the process.
    faulthandler.register(_SIGNAL, file=os.memfd_create(_memory_name(process)), all_threads=True)


def _memory_name(process: int) -> str:
    """Return a name with the process id: a forked process shares its parent's memory until it listens."""
    return f"grpo-dist-stacks-{process}"


async def look(processes: Sequence[int]) -> dict[int, str]:
    """Describe the stacks of these local processes, and of their children that `listen`."""
    return dict(zip(processes, await gather(_describe_children(p) for p in processes), strict=True))


def pending_calls() -> str:
    """Describe where the event loop's other tasks wait: its thread's stack shows only that it waits."""
    current = asyncio.current_task()
    stacks = Counter(_text(_coroutine_frames(t.get_coro())) for t in asyncio.all_tasks() if t is not current)
    return "\n".join(f"{n} call(s) wait in\n{stack}" for stack, n in stacks.most_common(_STACKS) if stack)


async def _describe_children(process: int) -> str:
    try:
        children = [child.pid for child in psutil.Process(process).children(recursive=True)]
        working = [child for child in children if _memory(child)]
        texts = await gather(_look(p) for p in (process, *working))
    except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
        return "dead"
    except OSError as error:
        return f"its process cannot be inspected ({error})"
    return texts[0] + "".join(f"\nits process {p}: {t}" for p, t in zip(working, texts[1:], strict=True))


async def _look(process: int) -> str:
    status = _status(process)
    if status["State"][0] in "ZX":
        return "dead"
    if status["State"][0] in "Tt":
        return f"stopped, as by SIGSTOP (state {status['State']}); SIGCONT resumes it"
    memory = _memory(process)
    if memory is None or not int(status["SigCgt"], 16) >> (_SIGNAL - 1) & 1:
        return f"starting: its process still loads the code of a worker (state {status['State']})"
    with memory.open("rb") as file:
        if not await _try_lock(file):
            return f"another process has held the lock on its stacks for {_TURN_S:g} s"
        dump = await _dump(process, file)
    if not dump:
        state, kernel = _status(process)["State"], Path(f"/proc/{process}/wchan").read_text()
        return f"no reaction to a signal in {_REACT_S:g} s (state {state}, in the kernel at {kernel})"
    # Show each stack once: several threads may share it.
    stacks = list(dict.fromkeys(text for thread in _threads(dump) if (text := _text(thread))))
    return "in\n" + "\nand in\n".join(stacks[:_STACKS]) if stacks else "in no call, it waits for work"


def _status(process: int) -> dict[str, str]:
    """Return the status fields of ``process``. Raises FileNotFoundError or ProcessLookupError if it ended."""
    return _read_status(Path(f"/proc/{process}"))


def _read_status(task: Path) -> dict[str, str]:
    """Read the status fields of a process or thread in /proc."""
    lines = (task / "status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _memory(process: int) -> Path | None:
    """Return the memory file to which the process writes its stacks; None if it does not listen."""
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(file)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith(f"/memfd:{_memory_name(process)} "):
            return file
    return None


async def _try_lock(file: IO[bytes]) -> bool:
    """Try for `_TURN_S` to lock ``file``, until it is closed. The lock serialises inspecting processes: two
    signals may arrive as one, and a dump that another process started is incomplete.
    """
    end = time.monotonic() + _TURN_S
    while time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            await asyncio.sleep(_POLL_S)
    return False


async def _dump(process: int, file: IO[bytes]) -> str:
    """Return the handler's output in the memory ``file`` of ``process``; "" if it does not start in time."""
    others, before = _find_handler_threads(process), os.fstat(file.fileno()).st_size
    size, begin = before, time.monotonic()
    os.kill(process, _SIGNAL)
    while time.monotonic() - begin < (_REACT_S if size == before else _WHOLE_S):
        await asyncio.sleep(_POLL_S)
        size = os.fstat(file.fileno()).st_size
        if size > before and _ended(process, others):
            break
    file.seek(before)
    return file.read().decode(errors="replace")


def _ended(process: int, others: set[str]) -> bool:
    """Return whether the handler has finished. A pause in its output is no proof: a process without CPU time
    pauses in the middle of its dump.
    """
    pending = int(_status(process)["ShdPnd"], 16) >> (_SIGNAL - 1) & 1
    return not pending and _find_handler_threads(process) <= others


def _find_handler_threads(process: int) -> set[str]:
    """Return the threads in which our signal is blocked, as it is while our handler runs."""
    threads = set()
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            if int(_read_status(thread)["SigBlk"], 16) >> (_SIGNAL - 1) & 1:
                threads.add(thread.name)
    return threads


_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@cache
def _plumbing() -> tuple[str, ...]:
    """Return the files where threads wait for work, and through which calls enter an actor."""
    folders = [*_folders("ray"), *asyncio.__path__, *concurrent.futures.__path__]
    files = [os.path.join(folder, "_monitor.py") for folder in _folders("tqdm")]
    files += [str(threading.__file__), str(selectors.__file__)]
    return (*(folder + os.sep for folder in folders), *files)


def _folders(package: str) -> list[str]:
    """Return the folders of ``package`` without importing it; [] if it is not installed."""
    spec = find_spec(package)
    return list(spec.submodule_search_locations or []) if spec else []


def _threads(dump: str) -> list[list[FrameSummary]]:
    """Parse the output of `faulthandler`: the frames of each thread, most recent call last."""
    threads = [_FRAME.findall(text) for text in _THREAD.split(dump)]
    return [[FrameSummary(f, int(n), name) for f, n, name in reversed(thread)] for thread in threads]


def _coroutine_frames(coroutine: Any) -> list[FrameSummary]:
    """Return the frames of a waiting coroutine, most recent call last."""
    frames = []
    while coroutine is not None:
        if (frame := getattr(coroutine, "cr_frame", None)) is not None:
            frames.append(FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        coroutine = getattr(coroutine, "cr_await", None)
        if type(coroutine).__name__ == "coroutine_wrapper":  # awaited from C, as Ray does
            coroutine = next(iter(gc.get_referents(coroutine)), None)
    return frames


def _text(stack: list[FrameSummary]) -> str:
    """Format ``stack`` as Python does, without frames that lead into the actor and frames of imports; "" if
    nothing is left.
    """
    frames = list(dropwhile(lambda frame: frame.filename.startswith(_plumbing()), stack))
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    return indent("".join(StackSummary.from_list(frames[-_FRAMES:]).format()), "  ").rstrip()
