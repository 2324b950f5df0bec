"""Log what a run does between steps: its start, evaluations, its last export.

    20:14:03     6.1 s  engines: load the model, compile, and answer a first request
    20:14:18    21.1 s  waiting: engines 15.0 s (rollout-0); policy ranks 15.0 s (policy-0)
    20:14:29    32.3 s  engines: done in 26.2 s
    20:14:30    33.0 s  ready in 33.0 s: libraries 2.5 s, Ray 3.1 s, policy ranks 19.2 s, engines 26.2 s

Every stage has a line when it begins and one when it ends, with the time of day and the seconds since the
command started. While stages are open, a line at least every 20 s names them and what each waits for. Later
training steps, whose lines come from their metrics, are named every two minutes. A live view replaces the
lines of stages that begin or are open.

One process has one terminal, so it has one log. Without a log, `stage` does nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

_NAMED = 3  # items that `join_names` lists
_WORTH_S = 0.5  # minimum time of a stage in the `ready` line
_EVERY_S = 15.0  # below the promised 20 s: a busy machine wakes threads late
_STEP = "step"  # any step but the first
_STEP_EVERY_S = 120.0


@dataclass
class Stage:
    """An open stage. ``waits_for``: describes what it waits for now. ``quiet``: logged only if it is long."""

    name: str
    begin: float
    waits_for: Callable[[], str]
    quiet: bool
    shown: bool = False
    note: str = ""

    @property
    def is_step(self) -> bool:
        """True for a training step after the first, whose end is logged elsewhere."""
        return self.name == _STEP

    def lasts(self, now: float) -> str:
        waits = self.note
        with suppress(Exception):  # it reads data that another thread changes
            waits = self.waits_for() or self.note
        return f"{self.name} {seconds_text(now - self.begin)}" + (f" ({waits})" if waits else "")


class StageLog:
    """The log of a process. Thread-safe.

    ``say``: prints a line. Called without the log's lock: a live view prints under another lock, and reads
    the open stages while holding it.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        every_s: float = _EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._every_s, self._clock = say, every_s, clock
        self._start = self._last = clock()
        self._open: list[Stage] = []
        self._ended_stages: list[tuple[Stage, float]] = []  # since the last `ready`, with seconds
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.has_view = False  # whether a live view shows the open stages

    def begin(self, name: str, what: str, waits_for: Callable[[], str], quiet: bool) -> Stage:
        stage = Stage(name, self._clock(), waits_for, quiet)
        with self._lock:
            self._open.append(stage)
            shown = not quiet and not self.has_view
            stage.shown = shown
        if shown:
            self._print(f"{name}: {_masked(what) or 'begins'}")
        return stage

    def end(self, stage: Stage, *, failed: bool = False) -> None:
        """Log the end of ``stage``. Call it once for every stage."""
        seconds = self._clock() - stage.begin
        with self._lock:
            self._open.remove(stage)
            if not stage.is_step:
                self._ended_stages.append((stage, seconds))
        if not stage.quiet or (stage.shown and (failed or not stage.is_step)):
            how = "failed after" if failed else "done in"
            self._print(f"{stage.name}: {how} {seconds_text(seconds)}")

    def ready(self) -> None:
        """Log how long the start took, and the time of its longer stages."""
        now = self._clock()
        with self._lock:
            ended, self._ended_stages = self._ended_stages, []
        parts = [f"{stage.name} {seconds_text(seconds)}" for stage, seconds in ended if seconds >= _WORTH_S]
        self._print(f"ready in {seconds_text(now - self._start)}: {', '.join(parts)}".removesuffix(": "))

    def note(self, text: str) -> None:
        """Set the progress note of the newest stage."""
        with self._lock:
            for stage in self._open[-1:]:
                stage.note = text

    def say(self, text: str) -> None:
        """Log a separate line."""
        self._print(text)

    def open_stages(self) -> list[str]:
        """Describe the open stages."""
        with self._lock:
            now = self._clock()
            return [stage.lasts(now) for stage in self._open if not stage.is_step]

    def beat(self) -> None:
        """Log the open stages if nothing was logged for a while."""
        with self._lock:
            now = self._clock()
            if not self._open or self.has_view:
                return
            since = max(self._last, min(stage.begin for stage in self._open))
            every_s = _STEP_EVERY_S if all(stage.is_step for stage in self._open) else self._every_s
            if now - since < every_s:
                return
            for stage in self._open:
                stage.shown = True
            line = "; ".join(stage.lasts(now) for stage in self._open)
        self._print(f"waiting: {line}")

    def run(self) -> None:
        """Log open stages until `close`."""
        while not self._ended.wait(1.0):
            self.beat()

    def close(self) -> None:
        self._ended.set()

    def _print(self, text: str) -> None:
        self._last = self._clock()
        with suppress(OSError, ValueError):  # the terminal is closed
            elapsed = seconds_text(self._last - self._start)
            self._say(f"{time.strftime('%H:%M:%S')}  {elapsed:>8}  {text}")


_current: StageLog | None = None


@contextmanager
def stages_logged(say: Callable[[str], None] | None = None, *, enabled: bool = True) -> Iterator[None]:
    """Log the stages of the block, if ``enabled``. No effect when nested."""
    global _current
    if not enabled or _current is not None:
        yield
        return
    _current = log = StageLog(say or print_line)
    threading.Thread(target=log.run, name="stages", daemon=True).start()
    try:
        yield
    finally:
        log.close()
        _current = None


@contextmanager
def stage(
    name: str, what: str = "", waits_for: Callable[[], str] = str, *, quiet: bool = False
) -> Iterator[None]:
    """Log the block as a stage. ``what``: text of its first line. ``waits_for``, ``quiet``: see `Stage`."""
    log = _current
    if log is None:
        yield
        return
    current_stage = log.begin(name, what, waits_for, quiet)
    try:
        yield
    except BaseException:
        log.end(current_stage, failed=True)
        raise
    log.end(current_stage)


class LoopStages:
    """Turns the phases of a training loop into stages: steps, evaluations, checkpoints. Only the first step
    is logged here: the console prints a line for each finished step.
    """

    def __init__(self) -> None:
        self._stepped = False
        self._phase = ""
        self._stage: tuple[StageLog, Stage] | None = None
        self._name = ""

    def phase(self, name: str) -> None:
        """Record that the loop begins phase ``name``."""
        self._phase = name
        if name == "evaluate":
            self._begin("evaluation", "held-out problems are sampled and scored", quiet=self._stepped)
        elif name == "validate":
            self._begin("validation", "the loss of held-out demonstrations", quiet=self._stepped)
        elif name == "save":
            self._begin("checkpoint", quiet=True)
        elif name == "end":
            self.end()
        elif self._stepped:
            self._begin(_STEP, waits_for=lambda: self._phase, quiet=True)
        else:
            self._begin("first step", "samples, rewards and an update", lambda: self._phase)

    def logged(self, *, step: bool) -> None:
        """Record that metrics of a step or of an evaluation were logged."""
        self._stepped = self._stepped or step
        if step or self._name != _STEP:  # an evaluation in the background ends no step
            self.end()

    def end(self, *, failed: bool = False) -> None:
        if self._stage is not None:
            log, stage = self._stage
            self._stage, self._name = None, ""
            log.end(stage, failed=failed)

    def _begin(
        self, name: str, what: str = "", waits_for: Callable[[], str] = str, *, quiet: bool = False
    ) -> None:
        if name == self._name or _current is None:
            return
        self.end()
        self._stage = _current, _current.begin(name, what, waits_for, quiet)
        self._name = name


def open_stages() -> list[str]:
    """Describe the open stages."""
    return _current.open_stages() if _current is not None else []


def note(text: str) -> None:
    """Set the progress note of the newest stage."""
    if _current is not None:
        _current.note(text)


def say(text: str) -> None:
    """Log a separate line, such as a finding of a stage."""
    if _current is not None:
        _current.say(_masked(text))


def _masked(text: str) -> str:
    from grpo_dist.config.secrets import masked  # imports pydantic, and every `--help` imports this module

    return masked(text)


def log_ready() -> None:
    """Log that the start is complete, and the time of its stages."""
    if _current is not None:
        _current.ready()


def shown_by_view(is_shown: bool) -> None:
    """Set whether a live view shows the open stages."""
    if _current is not None:
        _current.has_view = is_shown


def print_line(text: str) -> None:
    """Print a line in one piece, from any thread. Prints nothing if nobody reads stdout any more."""
    with suppress(OSError, AttributeError):  # a pipe without a reader; None, where stdout is closed
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def join_names(items: Sequence[str]) -> str:
    """Join three items and the number of others: rollout-0, rollout-1, rollout-2 and 5 more."""
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return ", ".join(items[:_NAMED]) + more


def clock_text(seconds: float) -> str:
    """Format a duration: 2.1 s, 3:04, 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def seconds_text(seconds: float) -> str:
    """Format a duration with its unit: 2.1 s, 3:04 min, 1:02:03 h."""
    unit = "" if seconds < 60 else " min" if seconds < 3600 else " h"
    return clock_text(seconds) + unit


class unread_output_dropped:
    """A block that ends early, without an error, if nobody reads the command's output any more."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        unread = drop_unread_output()
        return unread and isinstance(error, BrokenPipeError)


def drop_unread_output() -> bool:
    """Flush stdout and stderr, and return whether nobody reads one of them any more. Its text is then
    dropped: otherwise the interpreter would fail at exit, with another exit code.
    """
    unread = False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            unread = True
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
    return unread
