"""Environment variables of the processes of a host."""

from __future__ import annotations

import os
from collections.abc import Sequence

from grpo_dist.runtime.processes import code_directories, python_path

# The environment variables of code that the policy writes, in addition to what Python needs.
_HARMLESS = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


def environment_of(code_paths: Sequence[str], *, trusted: bool) -> dict[str, str]:
    """Return the environment of the processes. Raises ValueError for a directory that does not exist."""
    directories = code_directories("code_paths", code_paths, "environments")
    own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if trusted:
        return os.environ | own | {"PYTHONPATH": python_path(directories)}
    own |= {name: os.environ[name] for name in _HARMLESS if name in os.environ}
    own |= {"PYTHONHASHSEED": "0"}  # same code, same output: also the order of a set
    return own | {"PYTHONPATH": os.pathsep.join(directories)}
