"""The built-in trackers, each in a separate thread behind a bounded queue, and the configuration as they show
it.

    loop     log ----> [ queue, bounded ] ---->  thread: open, log, log, ..., close
               \
                dropped and counted when the queue is full

A tracker may raise or hang in any call: the run neither stops nor waits. It reports the first failure, and at
the end the number of missing records; the run directory has all records.

TensorBoard has metrics as scalars, and the configuration as text and as hyperparameters. Weights & Biases and
Trackio have metrics, tables of completions and the configuration, SwanLab metrics and the configuration; a
resumed run stays one run.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from grpo_dist.config import Config, TrackingConfig
from grpo_dist.config.files import dump_config
from grpo_dist.config.secrets import masked, masked_command
from grpo_dist.errors import UserError, raised
from grpo_dist.observe.completions import COLUMNS, Table

_PENDING, _TABLES_PENDING = 1000, 8  # queued; tables are large
_CLOSE_S = 45.0  # for all trackers together, at the end of a run
_SHOWN = ("reward/mean", "policy/entropy", "rollout/length_tokens")  # shown next to hyperparameters
_MODES = {"dryrun": "offline"} | {mode: mode for mode in ("online", "offline", "disabled")}
_EVALUATED = "eval/step"  # the x-axis of evaluations, which may end during a later step
_EVALUATIONS = ("eval/", "validation/")
_INIT_S = _FINISH_S = 30.0  # for the server to answer at the start, and to receive the rest at the end


def check_trackers(tracking: TrackingConfig) -> str:
    """Return the enabled trackers as text. Raises UserError for one whose package is not installed.

    An unreachable server is no error: it never stops a run.
    """
    packages = ("tensorboard", "wandb", "swanlab", "trackio")
    on = [package for package in packages if getattr(tracking, package)]
    for package in on:
        if find_spec(package) is None:
            raise UserError(
                f"`tracking.{package}` = {getattr(tracking, package)}, but the package {package} is not "
                f"installed; pip install {package}, or remove the setting"
            )
    return ", ".join(["metrics.jsonl", *on])


@dataclass(frozen=True, slots=True)
class ShownConfig:
    """The configuration as trackers show it, with *** for secrets.

    Attributes:
        name: name of the run.
        text: as YAML.
        tree: nested, for JSON.
    """

    name: str
    text: str
    tree: dict[str, Any]

    @classmethod
    def from_config(cls, config: Config) -> ShownConfig:
        return cls(config.name, dump_config(config), masked(config.model_dump(mode="json")))

    def flat(self) -> dict[str, str | int | float | bool]:
        """Return the settings by dotted key: {"policy.optimizer.lr": 1e-06, ...}."""
        return dict(_leaves(self.tree, ""))


def _leaves(value: Any, path: str) -> list[tuple[str, str | int | float | bool]]:
    if value and isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for name, v in inner for leaf in _leaves(v, f"{path}.{name}" if path else str(name))]
    return [(path, value if isinstance(value, str | int | float) else str(value))]


class Sink(Protocol):
    """A tracker. Metrics of a step may arrive in parts."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def table(self, step: int, table: Table) -> None: ...
    def close(self, *, failed: bool) -> None: ...


class AsyncSink:
    """A sink in its own thread. All methods but `join` return at once, and only they call ``warn``."""

    def __init__(
        self, name: str, open_sink: Callable[[Callable[[str], None]], Sink], warn: Callable[[str], None]
    ) -> None:
        """Start the thread, which calls ``open_sink`` with a function that reports problems."""
        self._name, self._open, self._warn = name, open_sink, warn
        self._work: queue.Queue[Callable[[Sink], None] | None] = queue.Queue()
        self._tables = threading.Semaphore(_TABLES_PENDING)  # free slots for tables, queued or being written
        self._messages: list[str] = []
        self._submitted = self._done = 0
        self._failed = False  # whether the run has failed, at its end
        self._reported: set[str] = set()  # failures that would repeat with each record
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        copy = dict(metrics)  # the loop may change ``metrics``
        self._submit(lambda sink: sink.log(step, copy), full=self._work.qsize() >= _PENDING)

    def table(self, step: int, table: Table) -> None:
        def write(sink: Sink) -> None:
            try:
                sink.table(step, table)
            finally:
                self._tables.release()

        self._submit(write, full=not self._tables.acquire(blocking=False))

    def end(self, *, failed: bool) -> None:
        """Ask the thread to finish its queue and close the sink."""
        self._failed = failed
        self._work.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the thread until ``deadline`` (`time.monotonic`), then report what is missing."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._note(f"did not finish within {_CLOSE_S:g} s and was abandoned")
        if missing := self._submitted - self._done:
            self._note(
                f"{missing} of {self._submitted} records are missing; the run directory has all of them"
            )
        self._deliver()

    def _submit(self, work: Callable[[Sink], None], *, full: bool) -> None:
        self._submitted += 1
        if not self._thread.is_alive():  # it could not be started, which was reported
            pass
        elif full:
            self._note_once("too slow or hanging; records that do not fit its queue are dropped")
        else:
            self._work.put(work)
        self._deliver()

    def _run(self) -> None:
        try:
            sink = self._open(self._note)
        except Exception as error:
            self._note(f"cannot be started; the run continues without it: {raised(error)}")
            return
        while (work := self._work.get()) is not None:  # bounded: `end` puts None
            try:
                work(sink)
                self._done += 1
            except Exception as error:
                self._note_once("failed; records that it refuses are dropped", f": {raised(error)}")
        try:
            sink.close(failed=self._failed)
        except Exception as error:
            self._note(f"cannot be closed: {raised(error)}")

    def _note_once(self, failure: str, reason: str = "") -> None:
        """Report ``failure`` with its first reason, and not again."""
        if failure not in self._reported:
            self._reported.add(failure)
            self._note(failure + reason)

    def _note(self, what: str) -> None:
        self._messages.append(f"{self._name}: {what}")

    def _deliver(self) -> None:
        while self._messages:
            self._warn(self._messages.pop(0))


def close_all(sinks: Sequence[AsyncSink], *, failed: bool) -> None:
    """Close all sinks, within one deadline. Raises the error of a warning that cannot be written."""
    deadline = time.monotonic() + _CLOSE_S
    for sink in sinks:
        sink.end(failed=failed)
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.join, deadline)


class TensorBoard:
    def __init__(self, directory: Path, config: ShownConfig, *, purge_step: int | None) -> None:
        """Open the writer. Events of ``purge_step`` and later steps from earlier launches are hidden."""
        from torch.utils.tensorboard import SummaryWriter  # optional
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(directory), purge_step=purge_step)
        self._writer.add_text("config", f"```yaml\n{config.text}```")
        # Not `add_hparams`, which would create another run.
        for part in hparams(config.flat(), dict.fromkeys(_SHOWN, 0.0)):
            self._writer._get_file_writer().add_summary(part)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, table: Table) -> None:
        """Do nothing: TensorBoard has no tables."""

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WandbRun:
    """A run at wandb; offline without a key or an answer of the server, for `wandb sync` to upload later."""

    def __init__(
        self,
        project: str,
        config: ShownConfig,
        run_dir: Path,
        run_id: str,
        warn: Callable[[str], None],
    ) -> None:
        """Open the run ``run_id``, or resume it."""
        import wandb  # optional

        with _masked_command():
            self._run = wandb.init(
                project=project,
                name=config.name,
                dir=str(run_dir),
                mode=online_mode(run_dir, warn),
                id=run_id,
                resume="allow",
                config=config.tree,
                # wandb does not capture the terminal output.
                settings=wandb.Settings(init_timeout=_INIT_S, finish_timeout=_FINISH_S, console="off"),
            )

        self._newest = 0
        for prefix in _EVALUATIONS:
            self._run.define_metric(f"{prefix}*", step_metric=_EVALUATED)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics. wandb closes a step when the next one starts, so parts of a step join it."""
        if any(name.startswith(_EVALUATIONS) for name in metrics):
            self._run.log(metrics | {_EVALUATED: float(step)}, step=self._accepted_step(step))
        else:
            self._run.log(metrics, step=self._open_step(step))

    def table(self, step: int, table: Table) -> None:
        import wandb

        rows = wandb.Table(list(COLUMNS), data=[list(row) for row in table.rows])
        at = self._accepted_step(step) if table.is_evaluation else self._open_step(step)
        self._run.log({table.name: rows}, step=at)

    def _open_step(self, step: int) -> int:
        """Return ``step``, or the newest: wandb refuses late records of an earlier step."""
        self._newest = max(step, self._newest)
        return self._newest

    def _accepted_step(self, step: int) -> int:
        """Return the first step from ``step`` on that wandb accepts, for records with a separate x-axis.

        A resumed run at wandb begins after its last step, and wandb silently drops records of that step and
        earlier ones. Repeated training steps keep their numbers, and are dropped: else they would replace
        each other in the first accepted step.
        """
        return max(step, self._newest, self._run.starting_step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


@contextmanager
def _masked_command() -> Iterator[None]:
    """Mask secrets in `sys.argv`, which wandb records."""
    command = sys.argv
    sys.argv = masked_command(command)
    try:
        yield
    finally:
        sys.argv = command


class _Run:
    """A run in a package with wandb's interface. Tables are left out."""

    _run: Any

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def table(self, step: int, table: Table) -> None:
        """Do nothing: SwanLab's tables are charts, without long texts."""

    def close(self, *, failed: bool) -> None:
        self._run.finish()


class SwanLabRun(_Run):
    """A run at SwanLab, in `swanlab/` of the run directory; offline without a key, for `swanlab sync`."""

    def __init__(
        self, project: str, config: ShownConfig, run_dir: Path, run_id: str, _: Callable[[str], None]
    ) -> None:
        """Open the run ``run_id``, or resume it."""
        import swanlab  # optional

        logged_in = "SWANLAB_API_KEY" in os.environ or (Path.home() / ".swanlab" / ".netrc").is_file()
        directory = run_dir / "swanlab"
        directory.mkdir(exist_ok=True)
        with _masked_command():
            self._run = swanlab.init(
                project=project, name=config.name, id=run_id, resume="allow", log_dir=str(directory),
                mode=os.environ.get("SWANLAB_MODE") or ("online" if logged_in else "offline"),
                config=config.tree,
            )  # fmt: skip

    def close(self, *, failed: bool) -> None:
        self._run.finish("crashed" if failed else "success")


class TrackioRun(_Run):
    """A run in Trackio, in the database of its project on this machine (TRACKIO_DIR)."""

    def __init__(self, project: str, config: ShownConfig, run_id: str, _: Callable[[str], None]) -> None:
        """Open the run, or resume it: Trackio identifies it by its name, which contains ``run_id``."""
        import trackio  # optional

        self._run = trackio.init(
            project=project, name=f"{config.name}-{run_id}", resume="allow", config=config.tree, embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def table(self, step: int, table: Table) -> None:
        import trackio

        rows = [list(row) for row in table.rows]
        self.log(step, {table.name: trackio.Table(columns=list(COLUMNS), data=rows)})


def online_mode(run_dir: Path, warn: Callable[[str], None]) -> Literal["online", "offline", "disabled"]:
    """Choose the mode by WANDB_MODE; if that is not set, online if the server accepts the key."""
    import wandb

    mode = _MODES.get(os.environ.get("WANDB_MODE", ""), "")
    if mode == "disabled":
        return "disabled"
    if mode == "offline":
        return "offline"
    try:
        if wandb.login(verify=True, prompt=False):
            return "online"
        reason = "no key is set" if mode == "online" else ""
    except wandb.Error as error:
        reason = " ".join(str(error).split())
    if reason:
        warn(f"{reason}; the run is stored in {run_dir / 'wandb'}; upload it with `wandb sync`")
    return "offline"
