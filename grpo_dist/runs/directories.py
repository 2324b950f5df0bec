"""Where a run writes: a directory that is free, or the one to resume in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_dist.config import CheckpointConfig
from grpo_dist.errors import RunEnded, expanded


def choose_run_dir(checkpoint: CheckpointConfig, name: str, output_dir: str) -> Path:
    """Return `output_dir/name`. With `checkpoint.resume: never`, where it exists, return the first free of
    `name-2`, `name-3` ...
    """
    base = expanded(output_dir) / name
    return base if checkpoint.resume == "auto" else free_directory(base)


@contextmanager
def resumed_by_name(checkpoint: CheckpointConfig, run_dir: Path) -> Iterator[None]:
    """Add to the message of a run that ends in the block how it is resumed: see `with_resume_settings`."""
    try:
        yield
    except RunEnded as end:
        end.args = (with_resume_settings(str(end), checkpoint, run_dir), *end.args[1:])
        raise


def with_resume_settings(message: str, checkpoint: CheckpointConfig, run_dir: Path) -> str:
    """Add to a ``message`` that advises the same command what resumes ``run_dir`` with
    `checkpoint.resume: never`: the command alone begins another run.
    """
    if checkpoint.resume == "auto" or "the same command" not in message:
        return message
    remedy = f"add checkpoint.resume=auto name={run_dir.name} to it"
    never = "`checkpoint.resume` = never: alone it begins another run in another directory"
    return f"{message}; {remedy} ({never})"


def free_directory(base: Path) -> Path:
    """Return ``base``, or the first of `base-2`, `base-3` ... that does not exist."""
    found, number = base, 2
    while os.path.lexists(found):
        found = base.with_name(f"{base.name}-{number}")
        number += 1
    return found


def make_free_directory(base: Path) -> Path:
    """Make `free_directory` of ``base`` and return it. No two processes get the same one."""
    while True:
        found = free_directory(base)
        try:
            found.mkdir(parents=True)
        except FileExistsError:  # another process was first
            continue
        return found


def check_writable(run_dir: Path) -> Path:
    """Return ``run_dir`` or the nearest parent that exists. Raises ValueError where that is not writable.
    Creates nothing.
    """
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{run_dir}: not writable; set `output_dir` to a writable directory")
    return nearest
