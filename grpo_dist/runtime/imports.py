"""Imports of large libraries, without a search for unreachable cycles among what they make."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Put the garbage collector off while a process that has just started imports libraries, and keep what
    there is then out of later collections: torch and vLLM make a million objects, which stay.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
