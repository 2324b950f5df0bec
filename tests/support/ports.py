"""Ports for servers that a test starts a moment later.

A port that the kernel chose may be given to another process before the server has started. These are below
the range that it chooses from, where there is room.
"""

import random
import socket
from pathlib import Path

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
