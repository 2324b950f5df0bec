"""One run and its directory: who may write into it, whether its steps are done, and where it resumes."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from grpo_dist.config import CheckpointConfig, Config
from grpo_dist.errors import RERUN, RunEnded, UserError
from grpo_dist.observe.tracker import Tracker
from grpo_dist.policy.full_weights import why_no_export
from grpo_dist.runs.checkpoint import (
    CHECKPOINTS,
    Checkpoints,
    CheckpointState,
    list_checkpoints,
    newest_whole,
)
from grpo_dist.runs.prepare import RunInputs
from grpo_dist.runs.resume import ResumePoint, load_resume_point, load_state
from grpo_dist.runtime.concurrency import deadline, run_in_thread
from grpo_dist.runtime.files import LOCK, alone, check_room, write_text

LOCK_PATIENCE_S = 10.0  # a process that was asked to end still holds the lock for a moment
MODEL = "model"  # in a run directory, the trained model
_DONE = "DONE"  # in a run directory once everything of the run is done; holds the number of steps


@dataclass(frozen=True)
class Run:
    """What a training session works with from its start to its end."""

    config: Config
    identity: Config  # see `resume.load_state`
    inputs: RunInputs
    directory: Path
    tracker: Tracker
    checkpoints: Checkpoints

    @asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """Do not let an error out of the block while a checkpoint is being written: see `settle`."""
        try:
            yield
        except Exception:
            await self.settle()
            raise

    async def settle(self) -> None:
        """Wait for the checkpoint being written. A failed one is dropped with a warning: the one before it
        stays the newest.
        """
        try:
            await self.checkpoints.settle()
        except Exception as error:
            self.tracker.warn(f"the checkpoint that was being written failed and is dropped ({error})")

    async def newest(self) -> ResumePoint:
        """Find the point to go back to. A thread reads the files, while the loop watches over the actors.

        Raises RunEnded where that takes longer than writing all checkpoints may take: with new workers,
        reading them again would take as long.
        """
        await self.settle()
        damaged: list[str] = []
        written = max(1, len(list_checkpoints(self.directory / CHECKPOINTS)))

        def find() -> ResumePoint:
            checkpoint = newest_whole(self.directory / CHECKPOINTS, damaged.append)
            state = load_state(checkpoint, self.identity) if checkpoint else None
            return load_resume_point(checkpoint, state, self.inputs.trained, self.inputs.origin)

        limit_s = self.config.cluster.timeouts.save_s * written
        try:
            async with deadline(limit_s, "recovery: find the newest undamaged checkpoint"):
                return await run_in_thread(find)
        except TimeoutError as error:
            raise RunEnded(f"{error}; when it can be read, {RERUN}") from error
        finally:
            for warning in damaged:
                self.tracker.warn(warning)


@contextmanager
def exclusive_directory(run_dir: Path, existing: Path) -> Iterator[None]:
    """Make ``run_dir`` and lock it for the length of the block. Waits a moment for a process that is ending.

    Where the block raises UserError and has left nothing in the directory, it is removed again, with empty
    parents below ``existing``, the nearest directory that was there before. Raises UserError where another
    process trains the run.
    """
    what = "training this run; wait for it, or choose another `name`"
    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(run_dir, what, patience_s=LOCK_PATIENCE_S))
        except OSError as error:
            check_room(existing, error)
            raise
        try:
            yield
        except UserError:
            # Only with the lock: without it, the directory belongs to the other process.
            if run_dir != existing and [path.name for path in run_dir.iterdir()] == [LOCK]:
                shutil.rmtree(run_dir)
                for parent in takewhile(lambda path: path != existing.absolute(), run_dir.absolute().parents):
                    with suppress(OSError):  # another process has put something into it by now
                        parent.rmdir()
            raise


def find_resume_state(
    config: Config, identity: Config, run_dir: Path, say: Callable[[str], None]
) -> tuple[Path | None, CheckpointState | None]:
    """Return the newest undamaged checkpoint of the run in ``run_dir`` and its state; None, None: it begins.

    ``say`` gets a warning for each damaged one. Raises ValueError where the checkpoint is that of another
    run, the run is complete, or its export would delete what is no earlier one.
    """
    resumes = config.checkpoint.resume == "auto"
    newest = newest_whole(run_dir / CHECKPOINTS, say) if resumes else None
    state = load_state(newest, identity) if newest else None
    check_unfinished(config.steps, run_dir, state.step if state else 0)
    check_exportable(config.checkpoint, run_dir)
    return newest, state


def check_unfinished(steps: int, run_dir: Path, step: int) -> None:
    """Raise UserError where the run in ``run_dir``, with ``step`` steps done by its newest checkpoint (0:
    there is none), has no more to do, or would begin again in the directory of a complete run.
    """
    done = finished_steps(run_dir)
    if done is not None and step == 0:
        raise UserError(
            f"{run_dir}: the run is complete ({done} steps), and {run_dir / CHECKPOINTS} has no checkpoint "
            "to continue from: it would begin again and overwrite its metrics; put the checkpoints back, "
            "choose another `name`, or set checkpoint.resume=never"
        )
    if step > steps and done != step:
        raise UserError(
            f"`steps` = {steps}: {run_dir} has done {step} already; set it to {step} or more, or "
            "choose another `name`"
        )
    if step >= steps and done == step:
        raise UserError(
            f"{run_dir}: the run is complete ({step} steps); choose another `name`, or set "
            "checkpoint.resume=never (or, with a constant learning rate, raise `steps` to continue it)"
        )


def check_exportable(checkpoint: CheckpointConfig, run_dir: Path) -> None:
    """Raise UserError where the trained model would take the place of what is no earlier export."""
    directory = run_dir / MODEL
    if checkpoint.export and (reason := why_no_export(directory)):
        raise UserError(
            f"{directory} is no earlier export of the run ({reason}), and the trained model takes its place "
            "at the end; move it away, choose another `name`, or set checkpoint.export=false"
        )


def finished_steps(run_dir: Path) -> int | None:
    """Return the steps of a run that is complete, with its last evaluation; None before that."""
    done = run_dir / _DONE
    if not done.exists():
        return None
    try:
        return int(done.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{done}: expected a file with the number of steps that the run has done ({error}); remove it, "
            f"and {RERUN}"
        ) from error


def mark_finished(run: Run) -> None:
    """Record that everything of ``run`` is done."""
    write_text(run.directory / _DONE, f"{run.config.steps}\n")
