"""Errors that end a run with one message instead of a traceback: input to be fixed (exit code 2), and runs
that end themselves before their last step.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

RERUN = "rerun the same command to resume from the last checkpoint"  # the remedy of messages

_PACKAGE = str(Path(__file__).parent)
_LONGEST = 600  # characters of an exception's text
_PLACE = re.compile(r"\([^()]+:\d+ in \S+\)$")  # the end of a text by `raised`


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
    """The run was asked to stop, and stopped cleanly."""

    exit_code = 75  # EX_TEMPFAIL: run it again


class Rollback(Exception):
    """A health check is out of bounds after ``step``: the run resumes from before it, without its batch."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class WorkerLost(RuntimeError):
    """An actor failed and is not replaced. The message names it and the reason."""


class StateLost(WorkerLost):
    """Lost state is only in a checkpoint: the run resumes from there."""


class SamplesLost(RuntimeError):
    """A node failed before all readers had fetched its samples."""


class SamplesFailed(RuntimeError):
    """Engines returned too few samples for a group."""


class TransferLost(RuntimeError):
    """A process of a transfer group, or the connection to it, failed. The driver finds out which."""


def expanded(path: str | Path) -> Path:
    """Expand a leading `~`. Raises UserError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = str(path).partition("/")[0]
        raise UserError(
            f"{path}: {user} names no user with a home directory; write the whole path, or ./{path} for a "
            "file of that name"
        ) from error


def searched(path: str | Path) -> str:
    """Return where a relative path is searched, for messages: `` in /home/me``; "" for an absolute path."""
    return "" if expanded(path).is_absolute() else f" in {Path.cwd()}"


def find_cause(error: BaseException) -> BaseException:
    """Return the exception of an actor without Ray's remote traceback in its message."""
    return getattr(error, "cause", None) or error


def one_line(text: str) -> str:
    """Join the lines of ``text``, and escape what a terminal would not print: a completion may be in it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))


def raised(error: BaseException) -> str:
    """Describe an exception with its last line of user code: outside this package, the standard library and,
    if possible, installed packages.

        ZeroDivisionError: division by zero (/home/me/rewards.py:7 in score)
    """
    try:
        text = one_line(str(error))[:_LONGEST]
    except BaseException:  # a user-defined class
        text = "its text cannot be read"
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<")]
    installed, library = (sysconfig.get_path(name) for name in ("purelib", "stdlib"))
    packages = [f for f in frames if f.filename.startswith(installed)]
    user_frames = [f for f in frames if f not in packages and not f.filename.startswith((_PACKAGE, library))]
    if not (user_frames := user_frames or [f for f in packages if not f.filename.startswith(_PACKAGE)]):
        return named
    last = user_frames[-1]
    return f"{named} ({last.filename}:{last.lineno} in {last.name})"


def failure_kind(reason: str) -> str:
    """Return the file and line in ``reason``, a text by `raised`: exceptions of one line are one kind. A
    reason without a line is a kind by itself.
    """
    place = _PLACE.search(reason)
    return place[0] if place else reason


def count_failures(reasons: Iterable[str]) -> list[tuple[str, int]]:
    """Return the first reason of each `failure_kind` with the count of the kind, the most frequent first."""
    first: dict[str, str] = {}
    counts = Counter(first.setdefault(failure_kind(reason), reason) for reason in reasons)
    return counts.most_common()


@contextmanager
def as_user_errors() -> Iterator[None]:
    """Turn ValueError and OSError (a file that cannot be read or written) of the block into UserError.
    Outside the block they are bugs and keep their traceback.
    """
    try:
        yield
    except (UserError, TimeoutError, ConnectionError) as error:
        if isinstance(cause := find_cause(error), UserError) and cause is not error:
            raise cause from error  # raised in an actor: Ray's message is the remote traceback
        raise
    except (ValueError, OSError) as error:
        raise UserError(str(find_cause(error))) from error


class Refused(ValueError):
    """``problems``: each is one thing to fix."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def refuse(problems: Iterable[str]) -> None:
    """Raise Refused with all ``problems``, if there are any."""
    if messages := list(problems):
        raise Refused(*messages)
