"""Python processes for code of users: the command that starts one, and what it may import."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_dist.errors import expanded

_ROOT = Path(__file__).resolve().parents[2]
# The child imports the grpo_dist of this process, whatever its code paths contain. The directory it comes
# from, which may be the working directory, is removed from the path again; -P excludes the working directory
# itself.
_CHILD = (
    "import sys; sys.path.insert(0, sys.argv.pop()); import {module} as child; del sys.path[0]; child.main()"
)


def child_command(module: str, *arguments: object, python: str | None = None) -> list[str]:
    """Return the command that calls ``main()`` of a module of this package, with ``arguments`` in sys.argv.

    ``python``: the interpreter; None: this one.
    """
    code = _CHILD.format(module=module)
    return [python or sys.executable, "-P", "-c", code, *map(str, arguments), str(_ROOT)]


def code_directories(key: str, given: Sequence[str], what: str) -> list[str]:
    """Return the directories that the configuration names under ``key``. Raises ValueError for one that does
    not exist. ``what``: is in them.
    """
    directories = [expanded(path).resolve() for path in given]
    for path, directory in zip(given, directories, strict=True):
        if not directory.is_dir():
            raise ValueError(
                f"{key}: {path!r} is not a directory (resolved to {directory}); expected directories with "
                f"modules of {what}"
            )
    return list(map(str, directories))


def python_path(directories: Sequence[str]) -> str:
    """Return PYTHONPATH with ``directories`` in front of what this process has."""
    # An empty entry, as in "a::b" or "a:", would mean the working directory.
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([*directories, *inherited])
