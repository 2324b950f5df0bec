"""Freed host memory, given back to the operating system."""

from __future__ import annotations

import ctypes
import gc


def return_freed_memory() -> None:
    """Give memory that this process has freed back to the operating system.

    glibc keeps what tensors of less than some megabytes occupied: after the supervised training of a model of
    135 M parameters 4.2 GiB of 4.9. Other C libraries than glibc have no such call and keep what they keep.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
