"""The real pretrained model, for tests that need one. They are skipped if its package is unavailable."""

import os
from functools import cache
from pathlib import Path

import pytest

from grpo_dist.demo.smollm2 import smollm2
from grpo_dist.runtime.model_files import cache_dir


@cache
def _directory() -> Path | str:
    """Return the model from the user's cache: the test session's cache starts empty."""
    session_cache = os.environ.pop("GRPO_DIST_CACHE", None)
    try:
        return smollm2()
    except ValueError as error:
        return str(error)
    finally:
        if session_cache is not None:
            os.environ["GRPO_DIST_CACHE"] = session_cache


def real_model() -> Path:
    """Return the model's directory, and link it into the tests' cache. Skips the test if unavailable."""
    directory = _directory()
    if isinstance(directory, str):
        pytest.skip(directory)
    linked = cache_dir() / directory.name
    if not linked.exists():
        linked.parent.mkdir(parents=True, exist_ok=True)
        linked.symlink_to(directory)
    return directory
