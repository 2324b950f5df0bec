"""A limit on the memory that this process may add to its present size."""

from __future__ import annotations

import os
import resource


def used_address_space() -> int:
    """Return the size of this process's address space, bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def limit_address_space(megabytes: int | None, used: int | None = None) -> None:
    """Limit the address space to ``used``, by default its present size, plus ``megabytes``.

    None for ``megabytes`` restores the system's limit.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = hard
    if megabytes is not None:
        limit = (used_address_space() if used is None else used) + megabytes * 2**20
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
