"""Errors that end a run with one message, not a traceback: what the user has to mend (exit code 2), and runs
that end themselves before their last step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Input that cannot be used: the message names key or file and row, the value, what was expected, what to
    do.
    """


class RunEnded(Exception):
    """A run that ended before its last step, on purpose, or at it with wrong books. Its checkpoints stand."""

    exit_code = 1


class Unhealthy(RunEnded):
    """What was watched is out of bounds. The same command would come to the same end."""

    exit_code = 3


class Preempted(RunEnded):
    """Asked to end, and ended in order."""

    exit_code = 75  # EX_TEMPFAIL: run me again


class Rollback(Exception):
    """What was watched is out of bounds after ``step``: the run goes on from before it, without its batch."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class WorkerLost(RuntimeError):
    """An actor is gone and is not replaced; says which, and why."""


class StateLost(WorkerLost):
    """What is gone held what only a checkpoint has now: the run goes on from there."""


class SamplesLost(RuntimeError):
    """Samples are gone with the node that held them, before everybody had read them."""


class TransferLost(RuntimeError):
    """A process of a transfer group is gone, or the connection to it is; the others find out which."""


def cause_of(error: BaseException) -> BaseException:
    """What an actor raised, without the remote traceback that it arrives with as its message."""
    return getattr(error, "cause", None) or error


@contextmanager
def refusals() -> Iterator[None]:
    """Within, a ValueError or OSError (a file that cannot be read or written) is a refusal of the input.
    Outside, it is a failure of the program and keeps its traceback.
    """
    try:
        yield
    except (UserError, TimeoutError, ConnectionError):
        raise
    except (ValueError, OSError) as error:
        raise UserError(str(cause_of(error))) from error
