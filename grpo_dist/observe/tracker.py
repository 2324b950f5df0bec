"""The recorder of a run: its directory, the terminal, and trackers.

    metrics.jsonl    one object per step; later metrics of a step (an evaluation) join its object
    timeline.jsonl   {"step": 3, "spans": [["rollout-0", "sample", begin, end], ...]}, seconds since 1970:
                     spans of every actor; "driver" has the phases of the loop
    events.jsonl     {"time": seconds since 1970, "step": 3, "message": "..."}: warnings with the last step;
                     empty without warnings
    ledger.jsonl     the outcome of every prompt
    samples/         every sample (`samples`), at some steps with values per token (`token_values`)
    quarantine/      quarantined batches

A failed write to the directory ends the run. The terminal and the trackers never do (`trackers`).
"""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType

from grpo_dist.batch.token_values import ValuesOfSamples, has_tokens
from grpo_dist.config import Config, SinkConfig
from grpo_dist.config.secrets import masked
from grpo_dist.errors import Preempted, RunEnded, UserError, find_cause, raised
from grpo_dist.observe.completions import step_of, table_of
from grpo_dist.observe.console import Console
from grpo_dist.observe.metrics_file import METRICS, MetricsFile
from grpo_dist.observe.profiling import TIMELINE, write_timeline
from grpo_dist.observe.samples import remove_after, write_groups
from grpo_dist.observe.trackers import (
    AsyncSink,
    ShownConfig,
    Sink,
    SwanLabRun,
    TensorBoard,
    TrackioRun,
    WandbRun,
    close_all,
)
from grpo_dist.plugins.inputs import SinkInputs
from grpo_dist.plugins.user_code import SINK, call, load
from grpo_dist.runtime.concurrency import Background
from grpo_dist.runtime.files import StepLines, check_room, flush
from grpo_dist.runtime.metering import Span, Usage
from grpo_dist.runtime.recorder import LedgerEntry, Recorder
from grpo_dist.runtime.stage_log import LoopStages, stage
from grpo_dist.types import Group
from grpo_dist.workers import WorkerUsage

EVENTS = "events.jsonl"
LEDGER = "ledger.jsonl"
_Opener = Callable[[Callable[[str], None]], Sink]  # takes the function that reports problems
_LOGGER = logging.getLogger("grpo_dist")
_TABLES_PENDING = 2  # sample tables; beyond, a slow disk delays the run instead of filling memory


class Warned(logging.Handler):
    """Turns warnings of the package's logger, such as a replaced actor, into warnings of the run."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(record.getMessage())


class Tracker(Recorder):
    """Records a run in all sinks. A context manager, so that they are always flushed."""

    def __init__(self, config: Config, run_dir: Path, *, start: int = 0, wandb_id: str | None = None) -> None:
        """Open all sinks. Records of steps after ``start`` are removed, except quarantined batches.

        ``wandb_id``: id of the resumed run in trackers.
        """
        self._config, self.directory = config, run_dir
        self._samples_dir = run_dir / "samples" if config.tracking.samples else None
        self._quarantine_dir = run_dir / "quarantine"
        self._writer = Background("samples", pending=_TABLES_PENDING)
        self._sinks: list[AsyncSink] = []
        self.wandb_id = wandb_id or uuid.uuid4().hex[:12]
        self._warned = Warned(self.warn)
        self._stages = LoopStages()
        self._open(start)

    def _open(self, start: int) -> None:
        config, run_dir = self._config, self.directory
        self._step = start
        with (run_dir / EVENTS).open("a"):  # create it: a run without warnings has an empty file
            pass
        self._ledger = StepLines(run_dir / LEDGER, keep_through=start)
        self._timeline = StepLines(run_dir / TIMELINE, keep_through=start)
        self._metrics = MetricsFile(run_dir / METRICS, keep_through=start)
        remove_after(start, run_dir / "samples")
        self._console = Console(config.name, config.steps, start) if config.tracking.console else None
        openers = _openers(config, run_dir, start, self.wandb_id)
        self._sinks = [AsyncSink(name, opener, self.warn) for name, opener in openers.items()]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self._step:  # else of an evaluation that ran in parallel
            self._step = step
            self._stages.logged(step="time/step_s" in metrics)
        self._metrics.log(step, metrics)
        self._show(lambda console: console.log(step, metrics))
        for sink in self._sinks:
            sink.log(step, metrics)

    def _show(self, what: Callable[[Console], None]) -> None:
        """Call ``what`` with the console; drop the console if its terminal is closed."""
        console = self._console
        if console is None:
            return
        try:
            what(console)
        except Exception as error:
            self._console = None
            with suppress(Exception):
                console.close(failed=True)
            self.warn(f"terminal output failed and is off from now on: {error}")

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        """Write a table of samples in the background. Raises the error of an earlier table.

        Trackers get the tables of evaluations, and of steps with per-token ``values``.
        """
        if self._samples_dir is None:
            return
        path = self._samples_dir / f"{name}.parquet"
        self._writer.submit(lambda: write_groups(path, groups, values))
        if self._sinks and (has_tokens(values) or name.startswith("eval_")):
            table = table_of(name, groups, values)
            for sink in self._sinks:
                sink.table(step_of(name), table)

    def phase(self, name: str) -> None:
        """Record that the loop enters phase ``name``."""
        self._stages.phase(name)
        self._show(lambda console: console.view.phase(name))

    def follow(self, usage: WorkerUsage) -> None:
        """Show the actors of ``usage`` from now on."""
        self._show(lambda console: console.view.follow(usage.states))

    def spans(self, step: int, loop_spans: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """Record the spans of the loop (``loop_spans``) and of each worker during ``step``."""
        by_actor = {"driver": loop_spans} | {name: usage.spans for name, usage in workers.items()}
        rows = [
            (name, span.stage, round(span.begin, 4), round(span.end, 4))
            for name, spans in by_actor.items()
            for span in spans
        ]
        self._timeline.add(step, {"spans": rows})
        self._show(lambda console: console.view.took(loop_spans, workers))
        if step in self._config.profile.steps:
            steps = [chosen for chosen in self._config.profile.steps if chosen <= step]
            self._writer.submit(lambda: write_timeline(self.directory, steps))

    def ledger(self, step: int, entry: LedgerEntry) -> None:
        """Add the outcomes of the prompts of ``step`` to the run's ledger."""
        self._ledger.add(step, entry)

    def quarantine(self, step: int, groups: list[Group]) -> str:
        """Keep the batch of a step that went wrong, whatever `tracking.samples` is; return its path."""
        path = self._quarantine_dir / f"step_{step:06d}.parquet"
        write_groups(path, groups)
        return str(path)

    def warn(self, message: str) -> None:
        self._show(lambda console: console.warn(message))
        if self._console is None:
            with suppress(OSError, ValueError):  # stderr is closed; the file has the message
                print(message, file=sys.stderr, flush=True)
        self.note(message)

    def note(self, message: str) -> None:
        """Write an event to `events.jsonl` only: it needs no action, or is on the terminal already."""
        event = {"time": round(time.time(), 3), "step": self._step, "message": message}
        with (self.directory / EVENTS).open("a") as file:
            file.write(json.dumps(event) + "\n")

    def back_to(self, step: int) -> None:
        """Remove the records of steps after ``step``, which the run repeats, as on a resume."""
        self.flush()
        self._stages.end(failed=True)
        self._close(failed=False)
        self._open(step)

    def flush(self) -> None:
        """Put every table and line on disk, before a checkpoint relies on it. Raises the error of a table."""
        self._writer.flush()
        for name in (METRICS, LEDGER, TIMELINE):
            flush(self.directory / name)

    def __enter__(self) -> Tracker:
        _LOGGER.addHandler(self._warned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LOGGER.removeHandler(self._warned)
        failed = error
        try:
            try:
                if isinstance(error, Exception) and not isinstance(error, Preempted):
                    cause = find_cause(error)
                    text = str(cause) if isinstance(cause, RunEnded | UserError) else raised(cause)
                    self.note(f"the run ended: {masked(text)}")
            finally:
                self._stages.end(failed=error is not None)
                with stage("tables", quiet=True):
                    self._writer.close()
        except Exception as write_error:
            if failed is None:  # else the run already ends with another error
                failed = write_error
                raise
        finally:
            try:
                with stage("trackers", quiet=True):
                    self._close(failed=failed is not None)
            finally:
                if isinstance(failed, Exception) and not isinstance(failed, RunEnded):
                    check_room(self.directory, failed)

    def _close(self, *, failed: bool) -> None:
        try:
            close_all(self._sinks, failed=failed)
        finally:
            self._show(lambda console: console.close(failed=failed))


def _openers(config: Config, run_dir: Path, start: int, run_id: str) -> dict[str, _Opener]:
    """Return for each enabled tracker the function that opens it, to be called in its thread."""
    settings, masked, openers = config.tracking, ShownConfig.from_config(config), dict[str, _Opener]()
    if settings.tensorboard:
        purge, directory = start + 1 if start else 0, run_dir / "tensorboard"
        openers["TensorBoard"] = lambda _: TensorBoard(directory, masked, purge_step=purge)
    if settings.wandb is not None:
        openers["wandb"] = partial(WandbRun, settings.wandb, masked, run_dir, run_id)
    if settings.swanlab is not None:
        openers["swanlab"] = partial(SwanLabRun, settings.swanlab, masked, run_dir, run_id)
    if settings.trackio is not None:
        openers["trackio"] = partial(TrackioRun, settings.trackio, masked, run_id)
    for i, sink in enumerate(settings.sinks):
        inputs = SinkInputs(run_dir, config.name, run_id, start, masked.flat())
        name = f"tracking.sinks.{i} {sink.function}" if sink.function in openers else sink.function
        openers[name] = partial(_open_user_sink, sink, config.code_paths, inputs)
    return openers


def _open_user_sink(
    settings: SinkConfig, code_paths: Sequence[str], inputs: SinkInputs, _: Callable[[str], None]
) -> Sink:
    sink: Sink = call(load(SINK, settings.function, code_paths), inputs, settings.kwargs)
    return sink
