"""What a run tells of itself: in its directory, on the terminal, to TensorBoard and wandb.

    metrics.jsonl    an object a step; what is logged for the same step later (an evaluation) joins it
    timeline.jsonl   {"step": 3, "spans": [["rollout-0", "sample", begin, end], ...]}, seconds since 1970:
                     what each actor did when; those of "driver" are the phases of the loop
    events.jsonl     {"time": seconds since 1970, "step": 3, "message": "..."}: warnings, and after which step
    ledger.jsonl     what became of every prompt
    samples/         every sample (`samples`), of some steps what training made of its tokens (`token_values`)
    aside/           batches of steps that went wrong
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from grpo_dist.background import Background
from grpo_dist.config import Config, Wandb
from grpo_dist.console import Console
from grpo_dist.durable import check_room, write_text
from grpo_dist.errors import RunEnded
from grpo_dist.ledger import LEDGER, Account
from grpo_dist.profiling import TIMELINE, write_timeline
from grpo_dist.samples import write_groups
from grpo_dist.secrets import masked
from grpo_dist.step_lines import StepLines, kept_lines
from grpo_dist.token_values import ValuesOfSamples
from grpo_dist.types import Group
from grpo_dist.usage import Span, Usage
from grpo_dist.workers import WorkerUsage

EVENTS = "events.jsonl"
_LOGGER = logging.getLogger("grpo_dist")
_TABLES_PENDING = 2  # of samples: a disk that is slower than the run holds it up, not fills its memory


class Warned(logging.Handler):
    """Warnings of the package's own logger, such as an actor that is replaced, are warnings of the run."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(record.getMessage())


class Sink(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self, *, failed: bool) -> None: ...


class Tracker:
    """All sinks of a run. Use as a context manager, so that they are flushed whatever happens."""

    def __init__(self, config: Config, run_dir: Path, *, start: int = 0, wandb_id: str | None = None) -> None:
        """``start``: what was written of later steps is taken back. ``wandb_id``: of the run that goes on."""
        self._config, self.directory = config, run_dir
        self._samples_dir = run_dir / "samples" if config.tracking.samples else None
        self._aside_dir = run_dir / "aside"
        self._writer = Background("samples", pending=_TABLES_PENDING)
        self._sinks: list[Sink] = []
        self.wandb_id: str | None = wandb_id
        self._warned = Warned(self.warn)
        self._open(start)

    def _open(self, start: int) -> None:
        config, run_dir = self._config, self.directory
        self._step = start
        self._ledger = StepLines(run_dir / LEDGER, keep_through=start)
        self._timeline = StepLines(run_dir / TIMELINE, keep_through=start)
        self._sinks.append(MetricsFile(run_dir / "metrics.jsonl", keep_through=start))
        self._console = Console(config.name, config.steps, start) if config.tracking.console else None
        if self._console is not None:
            self._sinks.append(self._console)
        if config.tracking.tensorboard:
            self._sinks.append(TensorBoard(run_dir / "tensorboard", purge_step=start + 1 if start else None))
        if config.tracking.wandb.enabled:
            run = WandbSink(config.tracking.wandb, config, run_dir, self.wandb_id)
            self.wandb_id = run.run_id
            self._sinks.append(run)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._step = step
        for sink in self._sinks:
            sink.log(step, metrics)

    def samples(self, name: str, groups: list[Group], values: ValuesOfSamples | None = None) -> None:
        """Written beside the loop. Raises what went wrong with an earlier table."""
        if self._samples_dir is not None:
            path = self._samples_dir / f"{name}.parquet"
            self._writer.submit(lambda: write_groups(path, groups, values))

    def phase(self, name: str) -> None:
        """What the loop begins now."""
        if self._console is not None:
            self._console.view.phase(name)

    def follow(self, usage: WorkerUsage) -> None:
        """These are the actors from now on."""
        if self._console is not None:
            self._console.view.follow(usage.states)

    def spans(self, step: int, own: Sequence[Span], workers: Mapping[str, Usage]) -> None:
        """When the loop (``own``) and each worker were busy with what during ``step``."""
        of_all = {"driver": own} | {name: usage.spans for name, usage in workers.items()}
        rows = [
            (name, span.stage, round(span.begin, 4), round(span.end, 4))
            for name, spans in of_all.items()
            for span in spans
        ]
        self._timeline.add(step, {"spans": rows})
        if self._console is not None:
            self._console.view.took(own, workers)
        if step in self._config.profile.steps:
            steps = [chosen for chosen in self._config.profile.steps if chosen <= step]
            self._writer.submit(lambda: write_timeline(self.directory, steps))

    def account(self, step: int, found: Account) -> None:
        """What became of the prompts of ``step``, for the run's ledger."""
        self._ledger.add(step, found)

    def aside(self, step: int, groups: list[Group]) -> str:
        """Keep the batch of a step that went wrong, whatever else is kept; returns where."""
        path = self._aside_dir / f"step_{step:06d}.parquet"
        write_groups(path, groups)
        return str(path)

    def warn(self, message: str) -> None:
        if self._console is not None:
            self._console.warn(message)
        else:
            print(message, file=sys.stderr, flush=True)
        event = {"time": round(time.time(), 3), "step": self._step, "message": message}
        with (self.directory / EVENTS).open("a") as file:
            file.write(json.dumps(event) + "\n")

    def back_to(self, step: int) -> None:
        """What was written of later steps comes again: it is taken back, as at a resume."""
        self.flush()
        while self._sinks:
            self._sinks.pop().close(failed=False)
        self._open(step)

    def flush(self) -> None:
        """Every table is on disk when this returns; raises what went wrong with one."""
        self._writer.flush()

    def __enter__(self) -> Tracker:
        _LOGGER.addHandler(self._warned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LOGGER.removeHandler(self._warned)
        failed = error
        try:
            self._writer.close()
        except Exception as own:
            if failed is None:  # otherwise the run already ends with an error of its own
                failed = own
                raise
        finally:
            for sink in self._sinks:
                sink.close(failed=failed is not None)
            if isinstance(failed, Exception) and not isinstance(failed, RunEnded):
                check_room(self.directory, failed)


class MetricsFile:
    """One JSON object per step. NaN is written as null: JSON has no NaN."""

    def __init__(self, path: Path, *, keep_through: int) -> None:
        """Keeps the lines of steps up to ``keep_through`` (a resumed run repeats the later ones) when that is
        above 0.
        """
        self._path = path
        self._last: dict[str, Any] | None = None
        kept = kept_lines(path, keep_through) if keep_through > 0 else []
        write_text(path, "".join(kept))
        self._last_offset = path.stat().st_size
        if kept:
            self._last = json.loads(kept[-1])
            self._last_offset -= len(kept[-1].encode())

    def log(self, step: int, metrics: dict[str, float]) -> None:
        known = {k: (v if math.isfinite(v) else None) for k, v in metrics.items()}
        joins = self._last is not None and self._last["step"] == step
        self._last = {**(self._last if joins and self._last else {"step": step}), **known}
        with self._path.open("rb+") as file:
            if not joins:
                self._last_offset = file.seek(0, os.SEEK_END)
            file.seek(self._last_offset)
            file.write((json.dumps(self._last) + "\n").encode())
            file.truncate()

    def close(self, *, failed: bool) -> None:
        """Every line is already on disk."""


class TensorBoard:
    def __init__(self, directory: Path, *, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WandbSink:
    """A wandb run; offline when no key is set, so that a missing key never stops a training run."""

    def __init__(self, settings: Wandb, config: Config, run_dir: Path, run_id: str | None) -> None:
        import wandb

        mode = settings.mode
        if mode == "auto":
            mode = "online" if wandb.api.api_key else "offline"
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=config.name,
            dir=str(run_dir),
            mode=mode,
            id=run_id,
            resume="allow" if run_id else None,
            config=masked(config.model_dump(mode="json")),
        )
        self.run_id: str = self._run.id

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """wandb closes a step when the next begins, so what joins a step later still lands in it."""
        self._run.log(metrics, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
