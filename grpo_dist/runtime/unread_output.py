"""Output of a command that nobody reads any longer, as after ``| head``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


def without_readers(command: Callable[P, int]) -> Callable[P, int]:
    """Have ``command``, which returns an exit code, end with 1 where nobody reads what it prints."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            if not drop_unread_output():
                raise
            return 1
        finally:
            drop_unread_output()

    return run


def drop_unread_output() -> bool:
    """Write what stdout and stderr hold, and return whether nobody reads one of them any longer. Its text is
    dropped then: the interpreter would fail on it when it ends, with an exit code of its own.
    """
    unread = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            unread = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
    return unread
