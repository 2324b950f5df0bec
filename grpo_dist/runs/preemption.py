"""SIGTERM and SIGINT: a run finishes and saves its step, if there is time.

    within `Interruption.finishing`    step and checkpoint, within `checkpoint.grace_s`: exit code 75
    elsewhere, or after the grace      it ends at once and keeps its checkpoints: exit code 75
    second signal                      it ends at once: exit code 128 + the signal's number

To end at once means to cancel the running task, and to end the actors while it unwinds.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from grpo_dist.errors import RERUN, Preempted, RunEnded

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(RunEnded):
    """The run was asked twice to stop, and stopped at once."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


class Interruption:
    """An async context manager that handles signals for the task that enters it."""

    def __init__(self, *, grace_s: float, say: Callable[[str], None]) -> None:
        self._grace_s, self._say = grace_s, say
        self._finishes = False
        self._signal: signal.Signals | None = None
        self._end: RunEnded | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Interruption:
        self._task = asyncio.current_task()
        self._handlers_before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._deafen()
        if self._signal is None:  # else another signal kills the process
            for number, handler in self._handlers_before.items():
                signal.signal(number, handler)
        if self._end is not None and isinstance(error, asyncio.CancelledError):
            raise self._end from None

    def listen(self) -> None:
        """Install the handlers. Call it again after a library, such as Ray, has installed other handlers."""
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._handle, number)

    def _deafen(self) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def stop_requested(self) -> bool:
        """Return whether the run is to end after its current step."""
        return self._signal is not None

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Let the body end by itself after the first signal, within the grace period.

        If the body then returns, it has saved its last step. If it fails, the run ends, too.
        """
        self._finishes = True
        try:
            yield
        except RunEnded:
            raise
        except Exception as error:
            if not self.stop_requested():
                raise
            first = str(error).partition("\n")[0]
            raise Preempted(f"stopped on request; the step was not saved ({first}); {RERUN}") from error
        finally:
            self._finishes = False
            if self._timer is not None:
                self._timer.cancel()
        if self.stop_requested():
            raise Preempted(f"stopped on request; the last step is saved; {RERUN}")

    def _handle(self, number: signal.Signals) -> None:
        name, first = number.name, self._signal is None
        self._signal = number
        if first and self._finishes:
            end = Preempted(
                f"{name}: step and checkpoint not finished within `checkpoint.grace_s` = "
                f"{self._grace_s:g} s; {RERUN}"
            )
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._cancel, end)
            self._say(
                f"{name}: stopping after this step and its checkpoint, within {self._grace_s:g} s "
                "(`checkpoint.grace_s`); a second signal stops it at once"
            )
        elif first:
            self._cancel(Preempted(f"{name}: stopped; {RERUN}"))
        else:
            self._cancel(Interrupted(f"{name}, again: stopped at once; {RERUN}", 128 + number))

    def _cancel(self, end: RunEnded) -> None:
        if self._end is None and self._task is not None:  # the first reason counts
            self._end = end
            self._task.cancel()
            self._deafen()  # another signal, while the actors are ended, kills the process


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM end the block with Preempted, outside of any `Interruption`: work before the first step
    and after the last leaves nothing half-written.

    Only the main thread receives signals; in other threads this does nothing.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        # Not an Exception: code of the block would report it as a failed import or download.
        raise SystemExit(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except SystemExit as end:
        # Ray's handler, which is active from Ray's start until `Interruption.listen`, raises the same.
        if end.code == signal.SIGTERM:
            raise Preempted(f"SIGTERM: stopped; {RERUN}") from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
