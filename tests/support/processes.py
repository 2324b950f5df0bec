"""Processes of this machine, and free ports."""

import random
import socket
import time
from pathlib import Path

from tests.support.patience import HANG_S

# Find remaining processes, for tests that must leave none.


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between open and read
        return False


def wait_until_gone(pids: list[int]) -> list[int]:
    """Return the processes that have not ended within ``HANG_S``."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def children_of(pid: int) -> list[int]:
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            pids.append(int(stat.parent.name))
    return pids


# Ports for servers that a test starts a moment later. The kernel may give a port that it chose to another
# process before the server has started. These are below the kernel's range, if there is room.

_FIRST = 20_000  # Ray's workers use the 10,000 before
_CHOSEN_BY_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host="127.0.0.1"):
    """Return a free port of ``host``, which the kernel assigns to nobody else."""
    end = int(_CHOSEN_BY_KERNEL.read_text().split()[0]) if _CHOSEN_BY_KERNEL.is_file() else 0
    room = range(_FIRST, end)
    # Not from the test's seeded generator: another process may have the same seed.
    for port in [*random.SystemRandom().sample(room, k=min(100, len(room))), 0]:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise AssertionError(f"no port of {host} is free")
