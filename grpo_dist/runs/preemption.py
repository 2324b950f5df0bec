"""A run that is asked to end by SIGTERM or SIGINT: it takes its step with it, if there is time.

    within `Interruption.finishing`    the step and a checkpoint, within `checkpoint.grace_s`: exit code 75
    elsewhere, or the grace over       at once; nothing is lost that a checkpoint has: exit code 75
    asked again                        at once: exit code 128 + the signal's number

At once means: what runs is cancelled, and the actors are ended on the way out.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from grpo_dist.errors import Preempted, RunEnded

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGAIN = "the same command goes on from the last checkpoint"


class Interrupted(RunEnded):
    """Asked to end, and ended where it was."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


class Interruption:
    """Listens for signals on behalf of the task that enters it, an async context manager."""

    def __init__(self, *, grace_s: float, say: Callable[[str], None]) -> None:
        self._grace_s, self._say = grace_s, say
        self._finishes = False
        self._asked: signal.Signals | None = None
        self._end: RunEnded | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Interruption:
        self._task = asyncio.current_task()
        self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._deafen()
        if self._end is not None and isinstance(error, asyncio.CancelledError):
            raise self._end from None

    def listen(self) -> None:
        """Also again after others, such as Ray when it starts, have put their own handlers in place."""
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._heard, number)

    def _deafen(self) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def asked(self) -> bool:
        """Whether the run should end after the step it is at."""
        return self._asked is not None

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Within, the first signal leaves it to the body to end, for the length of the grace. A body that
        ends as ever is one that has saved its last step; one that fails meanwhile ends the run all the same.
        """
        self._finishes = True
        try:
            yield
        except RunEnded:
            raise
        except Exception as error:
            if not self.asked():
                raise
            first = str(error).partition("\n")[0]
            raise Preempted(f"ended as asked, the step not saved ({first}); {_AGAIN}") from error
        finally:
            self._finishes = False
            if self._timer is not None:
                self._timer.cancel()
        if self.asked():
            raise Preempted(f"ended as asked after the last step, saved; {_AGAIN}")

    def _heard(self, number: signal.Signals) -> None:
        name, first = number.name, self._asked is None
        self._asked = number
        if first and self._finishes:
            self._say(
                f"{name}: ending after this step and its checkpoint, {self._grace_s:g} s at most "
                "(`checkpoint.grace_s`); once more ends at once"
            )
            end = Preempted(
                f"{name}: step and checkpoint not finished within `checkpoint.grace_s` = "
                f"{self._grace_s:g} s; {_AGAIN}"
            )
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._cancel, end)
        elif first:
            self._cancel(Preempted(f"{name}: ended; {_AGAIN}"))
        else:
            self._cancel(Interrupted(f"{name}, again: ended at once; {_AGAIN}", 128 + number))

    def _cancel(self, end: RunEnded) -> None:
        if self._end is None and self._task is not None:  # the first reason is the reason
            self._end = end
            self._task.cancel()
            self._deafen()  # should ending the actors take long, the next signal kills


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within, SIGTERM raises Preempted, where no `Interruption` listens: work before the first step leaves
    nothing half-written.

    Only the main thread hears signals; in others nothing changes.
    """

    early = Preempted(f"SIGTERM: ended while starting up; {_AGAIN}")

    def heard(number: int, frame: FrameType | None) -> None:
        raise early

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, heard)
    try:
        yield
    except SystemExit as end:
        # Ray's own handler, which is in place from its start until an `Interruption` listens again.
        if end.code == signal.SIGTERM:
            raise early from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
