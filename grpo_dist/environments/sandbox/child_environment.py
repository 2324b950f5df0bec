"""Environment variables of the processes of a host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

# All that code of the policy finds in its environment, besides what Python needs.
_HARMLESS = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


def environment_of(code_paths: Sequence[str], *, trusted: bool) -> dict[str, str]:
    """Return the environment of the processes. Raises ValueError for a directory that does not exist."""
    directories = [Path(path).expanduser().resolve() for path in code_paths]
    for given, directory in zip(code_paths, directories, strict=True):
        if not directory.is_dir():
            raise ValueError(
                f"environments.code_paths: {given!r} is not a directory (resolved to {directory}); expected "
                "directories with modules of environments"
            )
    paths = [str(directory) for directory in directories]
    own = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if trusted:
        # An empty entry, as in "a::b" or "a:", would mean the working directory.
        paths += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        own = os.environ | own
    else:
        own |= {name: os.environ[name] for name in _HARMLESS if name in os.environ}
        own |= {"PYTHONHASHSEED": "0"}  # same code, same output: also the order of a set
    return own | {"PYTHONPATH": os.pathsep.join(paths)}
