"""Errors that are the user's to mend. The command line prints their one message and exits with code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Input that cannot be used: the message names key or file and row, the value, what was expected, what to
    do.
    """


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
        # What an actor raised arrives with its remote traceback as the message; the cause has the words
        # alone.
        raise UserError(str(getattr(error, "cause", None) or error)) from error
