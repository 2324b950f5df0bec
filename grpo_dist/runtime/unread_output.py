"""Output of a command that nobody reads any longer, as after ``| head``."""

from __future__ import annotations

import os
import sys
from types import TracebackType


class unread_output_dropped:
    """A block in which the command may find that nobody reads what it prints. The block then ends early."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        unread = drop_unread_output()
        return unread and isinstance(error, BrokenPipeError)


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
