"""Imports of large libraries: logged, and without a search for unreachable cycles among what they make."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_dist.runtime.stage_log import stage


@contextmanager
def libraries_loaded() -> Iterator[None]:
    """Log the imports of the block as a stage, `libraries`. They take seconds, on a busy machine many."""
    with stage("libraries", "are loaded"), without_collections():
        yield


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable the garbage collector while a process that has just started imports libraries, and keep what
    there is then out of later collections: torch and vLLM make a million objects, nearly all of which stay.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def freeze_loaded() -> None:
    """Keep all that is there now out of later collections: this worker has loaded what it lives with. A full
    collection visits every object of torch, transformers and DeepSpeed, half a million, for 0.3 to 0.6 s.
    """
    gc.collect()  # what is garbage now would never be freed
    gc.freeze()
