"""The real pretrained model, for tests that need one. They are skipped where its package cannot be had."""

import os
from functools import cache
from pathlib import Path

import pytest

from grpo_dist.demo.smollm2 import smollm2
from grpo_dist.runtime.model_files import cache_dir


@cache
def _directory() -> Path | str:
    """Look in the user's cache first, where the tests' own cache of a session is empty."""
    own = os.environ.pop("GRPO_DIST_CACHE", None)
    try:
        return smollm2()
    except ValueError as error:
        return str(error)
    finally:
        if own is not None:
            os.environ["GRPO_DIST_CACHE"] = own


def real_model() -> Path:
    """Return the model's directory, which is also in the tests' cache from then on; skip the test where it
    cannot be had.
    """
    found = _directory()
    if isinstance(found, str):
        pytest.skip(found)
    linked = cache_dir() / found.name
    if not linked.exists():
        linked.parent.mkdir(parents=True, exist_ok=True)
        linked.symlink_to(found)
    return found
