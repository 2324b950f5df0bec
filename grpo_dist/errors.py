"""Errors that end a run with one message instead of a traceback: input to be fixed (exit code 2), and runs
that end themselves before their last step.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RERUN = "rerun the same command to resume from the last checkpoint"  # the remedy of messages

_PACKAGE = str(Path(__file__).parent)


class UserError(ValueError):
    """Input that cannot be used. The message names the key, or file and row, the value, what was expected,
    and what to do.
    """


class RunEnded(Exception):
    """A run that ended early on purpose, or finished with an inconsistent ledger. Its checkpoints are
    kept.
    """

    exit_code = 1


class Unhealthy(RunEnded):
    """A health check is out of bounds. The same command would end the same way."""

    exit_code = 3


class Preempted(RunEnded):
    """The run was asked to end, and ended in order."""

    exit_code = 75  # EX_TEMPFAIL: run it again


class Rollback(Exception):
    """A health check is out of bounds after ``step``: the run resumes from before it, without its batch."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class WorkerLost(RuntimeError):
    """An actor is lost and is not replaced. The message names it and the reason."""


class StateLost(WorkerLost):
    """State is lost that only a checkpoint still holds: the run resumes from there."""


class SamplesLost(RuntimeError):
    """Samples are lost with the node that held them, before all readers had them."""


class SamplesFailed(RuntimeError):
    """Engines could not give the samples of a prompt that suffice for its group."""


class TransferLost(RuntimeError):
    """A process of a transfer group, or the connection to it, is lost. The driver finds out which."""


def expanded(path: str | Path) -> Path:
    """Return ``path`` with the home directory of a user for a `~` at its begin. Raises UserError where there
    is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = str(path).partition("/")[0]
        raise UserError(
            f"{path}: {user} names no user with a home directory; write the whole path, or ./{path} for a "
            "file of that name"
        ) from error


def cause_of(error: BaseException) -> BaseException:
    """Return what an actor raised, without the remote traceback that Ray puts into its message."""
    return getattr(error, "cause", None) or error


def raised(error: BaseException) -> str:
    """Describe an exception of user code with the last line of that code: neither of this package, nor of the
    standard library, nor, if there is another, of an installed package.

        ZeroDivisionError: division by zero (/home/me/rewards.py:7 in score)
    """
    named = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    installed, library = (sysconfig.get_path(name) for name in ("purelib", "stdlib"))
    packages = [f for f in frames if f.filename.startswith(installed)]
    own = [f for f in frames if f not in packages and not f.filename.startswith((_PACKAGE, library))]
    if not (places := own or [f for f in packages if not f.filename.startswith(_PACKAGE)]):
        return named
    return f"{named} ({places[-1].filename}:{places[-1].lineno} in {places[-1].name})"


@contextmanager
def refusals() -> Iterator[None]:
    """Turn ValueError and OSError (a file that cannot be read or written) inside the block into UserError.
    Outside such a block they are failures of the program and keep their traceback.
    """
    try:
        yield
    except (UserError, TimeoutError, ConnectionError) as error:
        if isinstance(cause := cause_of(error), UserError) and cause is not error:
            raise cause from error  # of an actor: Ray's own message is the remote traceback
        raise
    except (ValueError, OSError) as error:
        raise UserError(str(cause_of(error))) from error
