"""Limits of the processes of an episode, and what they use."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

MOST_FILES = 8192  # files and directories of an episode
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode; None: the system's.

    Attributes:
        memory_mb: MiB that a process may add to its size at start, and all of an episode together.
        cpu_s: CPU seconds of all processes of an episode together.
        processes: processes and threads of an episode.
        files_mb: size of the largest file, MiB; of all together where the episode's directory is its own file
            system.
        output_kb: KiB of what a request prints that is kept; 0: prints are discarded.
        reply_kb: size of the largest reply, KiB.
    """

    memory_mb: int
    cpu_s: float | None = None
    processes: int | None = None
    files_mb: int | None = None
    output_kb: int = 0
    reply_kb: int = 16 * 1024


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """CPU seconds, and bytes that belong to no file."""

    cpu_s: float = 0.0
    memory: int = 0

    @classmethod
    def of(cls, pids: set[int], *, exact: bool) -> TreeUsage:
        """Measure these processes together. The working directory is the /proc that knows them.

        Args:
            exact: count each page once, though processes share it. That reads every mapping; otherwise the
                sum may be too high.
        """
        cpu_s, memory = 0.0, 0
        for pid in pids:
            with suppress(OSError, ValueError, IndexError):  # it has ended
                cpu_s += _cpu_s(pid)
                memory += _own_memory(pid, exact=exact)
        return cls(cpu_s, memory)


def files_exceed(directory: str, megabytes: int) -> bool:
    """Return whether the files below ``directory`` need more, or are more than `MOST_FILES`."""
    size, count, waiting = 0, 0, [directory]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                count += 1
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                if size > megabytes * 2**20 or count > MOST_FILES:
                    return True
    return False


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of the process and of its children that it has waited for."""
    with open(f"{pid}/stat", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK


def _own_memory(pid: int, *, exact: bool) -> int:
    wanted = ("Pss_Anon:", "Pss_Shmem:") if exact else ("RssAnon:", "RssShmem:")
    with open(f"{pid}/{'smaps_rollup' if exact else 'status'}") as file:
        lines = [line.split() for line in file]
    return sum(int(line[1]) * 1024 for line in lines if line and line[0] in wanted)
