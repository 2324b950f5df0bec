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
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends between open and read
        return False


def wait_until_gone(pids: list[int]) -> list[int]:
    """Return the processes that do not end."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


# Ports for servers that a test starts a moment later.
#
# A port that the kernel chose may be given to another process before the server has started. These are below
# the range that it chooses from, where there is room.

_FIRST = 20_000  # the 10,000 before are those of Ray's workers
_CHOSEN_BY_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host="127.0.0.1"):
    """Return a port of ``host`` that is free, and that nobody gets who does not ask for it."""
    end = int(_CHOSEN_BY_KERNEL.read_text().split()[0]) if _CHOSEN_BY_KERNEL.is_file() else 0
    room = range(_FIRST, end)
    # Not of the seeded numbers of a test, which another process may have, too.
    for port in [*random.SystemRandom().sample(room, k=min(100, len(room))), 0]:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise AssertionError(f"no port of {host} is free")
