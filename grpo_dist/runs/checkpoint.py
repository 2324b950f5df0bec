"""The checkpoints of a run: what a step directory holds, and how it is written, published, found and pruned.

    checkpoints/step_000020/
        policy/         DeepSpeed's model, optimiser and schedule state, one part per rank
        reference.safetensors  the reference, where it is refreshed during the run
        ahead/*.parquet finished groups of batches launched ahead of training (max_staleness > 0), of whole
                        and of unfinished batches
        state.json      step, fingerprints of configuration, data, their origin and columns, KL coefficient,
                        prompts taken and their order, how launched batches are sampled, hashes of own code,
                        tracker run id, state of the health checks, moments of all rewards so far,
                        evaluations that were not finished
        config.yaml     the configuration of the run
        manifest.json   size and checksum of every other file

A directory is written under a temporary name, flushed, and renamed: one with its final name is complete. The
manifest shows later damage; it is checked before a checkpoint is loaded. `resume` reads checkpoints back.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from threading import Event
from typing import IO, Any

from grpo_dist.config import Config
from grpo_dist.config.files import dump_config
from grpo_dist.loop.progress import Progress
from grpo_dist.observe.samples import write_groups
from grpo_dist.plugins.user_code import changed_code
from grpo_dist.runs.identity import DataOrigin, columns_digest, data_digest, digest_run_code, fingerprint
from grpo_dist.runtime.concurrency import deadline, run_in_thread
from grpo_dist.runtime.files import clear, exchange, flush, publish
from grpo_dist.types import Prompt
from grpo_dist.workers import Workers

MANIFEST = "manifest.json"
_BLOCK = 1 << 22
_LARGEST = 64 * 2**20  # bytes of a manifest, more than any run writes
_THREADS = 8  # hashing releases the GIL
CHECKPOINTS = "checkpoints"  # in a run directory
REFERENCE = "reference.safetensors"
STATE = "state.json"
_PARTIAL = ".partial_"
_NAME = re.compile(r"step_(\d{6,})")


def write_manifest(directory: Path) -> None:
    """Write size and BLAKE2b of every file below ``directory`` to its manifest.json."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_digest, files))
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(files, digests, strict=True)
    }
    (directory / MANIFEST).write_text(json.dumps({"files": listed}, indent=1))


def find_damage(directory: Path, *, must_have: Sequence[str] = ()) -> str | None:
    """Describe the first file that differs from the manifest; None where all match. Never raises and never
    blocks, whatever the directory holds. ``must_have``: files that a manifest must list.
    """
    try:
        listed = json.loads(_text(directory / MANIFEST))["files"]
        expected = [(name, entry["bytes"], entry["blake2b"]) for name, entry in listed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    names = {name for name, _, _ in expected}
    if missing := [name for name in must_have if name not in names] or ([] if names else ["any file"]):
        return f"{MANIFEST} does not list {missing[0]}"
    # Sizes first: they cost nothing, and most damaged files are short.
    for name, size, _ in expected:
        if problem := _misses(directory, name, size):
            return f"{json.dumps(name)[1:-1]} {problem}"
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(lambda item: (item[0], _differs(directory / item[0], item[2])), expected)
        return next((f"{json.dumps(name)[1:-1]} {why}" for name, why in checked if why), None)


def _text(path: Path) -> str:
    """Read a regular file of limited size. Raises OSError or ValueError for any other."""
    with _open(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST:
            raise ValueError(f"it has {size} bytes")
        return file.read().decode()


def _open(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises OSError for anything but a regular file, and never blocks on a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return open(descriptor, "rb")


def _misses(directory: Path, name: str, size: Any) -> str | None:
    """Describe how the file differs from its entry, apart from its contents; None where it does not."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return "is listed, but lies outside the directory"
    try:
        status = (directory / name).stat()
    except (OSError, ValueError):  # the latter for a name that no file can have
        return "is missing"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return None if status.st_size == size else f"has {status.st_size} bytes instead of {size}"


def _differs(path: Path, digest: Any) -> str | None:
    try:
        return None if _digest(path) == digest else "has changed: its checksum differs"
    except OSError as error:
        return f"cannot be read ({error})"


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with _open(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class CheckpointState:
    """The driver's part of a checkpoint: state.json. ``step`` steps are done, and batch ``step`` is next."""

    step: int
    fingerprint: str  # of the configuration keys that a resumed run must keep
    data: str  # digest of the training prompts, in order
    kl_coef: float | None = None
    taken: Mapping[str, list[int]] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)
    wandb_id: str | None = None
    health: Mapping[str, Any] = field(default_factory=dict)
    unassessed: bool = False
    rewards: Mapping[str, Any] = field(default_factory=dict)  # moments, for `algorithm.reward_norm` running
    evaluations: Sequence[int] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # of launched batches, by number
    schedule: Mapping[str, Any] = field(default_factory=dict)  # what `sampling` was steered to
    lengths: Mapping[str, Any] = field(default_factory=dict)  # trained so far, with `batch.order` completion
    # Hashes of the user's own code, see `identity.digest_run_code`; None: written before they were kept.
    code: Mapping[str, str] | None = None
    columns: str | None = None  # digest of the training prompts' columns; None: written before it was kept
    origin: Mapping[str, Any] | None = None  # `DataOrigin` of the training prompts; None: as above
    best: Sequence[float] | None = None  # step and value, with `checkpoint.keep_best`

    def changed_code(self, hashes: Mapping[str, str]) -> list[str]:
        """Return what differs in ``hashes``, those of the user's code now; [] where none were kept."""
        return [] if self.code is None else changed_code(self.code, hashes)


class Checkpoints:
    """The checkpoint directory of one run. It deletes only directories with names of its own kind."""

    def __init__(
        self,
        directory: Path,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        identity: Config | None = None,
        wandb_id: str | None = None,
        origin: DataOrigin | None = None,
    ) -> None:
        """``identity``: see `load_state`. ``origin``: of ``prompts``, see `check_data`."""
        self._origin = None if origin is None else asdict(origin)
        self._directory, self._config, self._wandb_id = directory, config, wandb_id
        self._fingerprint = fingerprint(identity or config)
        self._data, self._columns = data_digest(prompts), columns_digest(prompts)
        # Now: files that change later are not what was imported.
        self._code = digest_run_code(config.user_components, config.rewards, config.data)
        self._writing: asyncio.Task[None] | None = None
        self._saves = count()

    async def save(self, step: int, workers: Workers, progress: Progress) -> None:
        """Save the state after ``step`` steps. It is written while the next steps run, unless
        `checkpoint.background` is off. Raises the error of the previous save, if that failed.
        """
        await self.settle()
        remove_partial(self._directory)  # left by abandoned saves
        final = self._directory / f"step_{step:06d}"
        # Each save has its own name: an abandoned one may still write into its directory.
        partial = self._directory / f"{_PARTIAL}{final.name}_{next(self._saves)}"
        partial.mkdir(parents=True)
        blocking = not self._config.checkpoint.background
        await workers.policy.save(partial / "policy", blocking=blocking)
        if workers.reference is not None and self._config.reference.refresh_every:
            async with deadline(
                self._config.cluster.timeouts.save_s,
                f"reference: checkpoint to {partial}",
                explain=workers.where_stuck,
            ):
                await workers.reference.save(partial / REFERENCE)
        finish = self._finish(step, partial, final, workers, progress)
        self._writing = asyncio.create_task(finish, name=f"checkpoint {step}")
        if blocking:
            await self.settle()

    async def settle(self) -> None:
        """Wait until the checkpoint being written is published. Raises the error of a failed save."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def _finish(
        self, step: int, partial: Path, final: Path, workers: Workers, progress: Progress
    ) -> None:
        await workers.policy.saved()
        abandoned = Event()
        try:
            async with deadline(self._config.cluster.timeouts.save_s, f"checkpoint: {final} is published"):
                await run_in_thread(lambda: self._publish(step, partial, final, progress, abandoned))
        except BaseException:  # also where the save is cancelled: the thread goes on
            abandoned.set()
            raise

    def _publish(self, step: int, partial: Path, final: Path, progress: Progress, abandoned: Event) -> None:
        """Write the driver's part and rename the directory, unless it is ``abandoned`` by then. A thread does
        it: the loop keeps receiving.
        """
        pipeline = progress.pipeline
        for number, batch in pipeline.ahead.items():
            write_groups(partial / "ahead" / f"batch_{number:06d}.parquet", batch.groups, for_training=True)
            if batch.discarded:
                write_groups(partial / "ahead" / f"discarded_{number:06d}.parquet", batch.discarded)
        for number, groups in pipeline.partial.items():
            write_groups(partial / "ahead" / f"begun_{number:06d}.parquet", groups, for_training=True)
        state = CheckpointState(
            step,
            self._fingerprint,
            self._data,
            progress.kl_coef,
            {str(batch): indices for batch, indices in pipeline.order_indices.items()},
            asdict(pipeline.order),
            self._wandb_id,
            asdict(progress.health),
            progress.evaluation_pending,
            asdict(progress.rewards),
            progress.evaluations,
            {str(batch): asdict(sampling) for batch, sampling in pipeline.sampling.items()},
            asdict(pipeline.schedule),
            pipeline.lengths,
            self._code,
            self._columns,
            self._origin,
            progress.best,
        )
        (partial / STATE).write_text(json.dumps(asdict(state), indent=1))
        (partial / "config.yaml").write_text(dump_config(self._config))
        write_manifest(partial)
        flush(partial)  # before the checkpoint it replaces is removed
        unharmed = final.exists() and checkpoint_damage(final) is None
        if abandoned.is_set():  # the run has gone back to the checkpoint before, and makes the steps again
            return
        if unharmed:
            # A checkpoint of the same step, perhaps with fewer finished groups. The exchange leaves no moment
            # without one. Where the file system cannot exchange names, the earlier one stays.
            exchange(partial, final)
            clear(partial)  # a link, where a user has moved the earlier one; what it leads to stays
            return
        clear(final)
        publish(partial, final)
        self._prune(step, best=progress.best[0] if progress.best else None)

    def _prune(self, step: int, *, best: int | None) -> None:
        """Delete all but the newest `checkpoint.keep` checkpoints up to ``step``, and that of step ``best``.
        Later ones are damaged: the run resumed from before them, and replaces each when it reaches that step.
        """
        checkpoints = [path for path in list_checkpoints(self._directory) if step_of(path) <= step]
        for old in checkpoints[: -self._config.checkpoint.keep]:
            if step_of(old) != best and not old.is_symlink():  # a link is a user's way to keep it
                # A reader finds it whole or not at all. What a kill leaves of it goes with the next save.
                doomed = old.with_name(f"{_PARTIAL}deleted_{old.name}")
                clear(doomed)
                old.rename(doomed)
                shutil.rmtree(doomed)


def remove_partial(directory: Path) -> None:
    """Delete what killed and failed saves have left in ``directory``. No save may be running there."""
    for left in directory.glob(f"{_PARTIAL}*"):
        if left.is_symlink() or left.is_file():  # made by a user, to have saves written elsewhere
            left.unlink()
        shutil.rmtree(left, ignore_errors=True)  # an abandoned save may still be writing into it


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in ``directory``, oldest first."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted((p for p in paths if _NAME.fullmatch(p.name)), key=step_of)


def newest_whole(directory: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest undamaged checkpoint, or None without any checkpoint. ``say`` gets a warning for each
    newer damaged one. Raises ValueError when all are damaged.
    """
    checkpoints = list_checkpoints(directory)
    damages = []
    for checkpoint in reversed(checkpoints):
        damage = checkpoint_damage(checkpoint)
        if damage is None:
            return checkpoint
        damages.append(f"{checkpoint}: {damage}")
        say(f"warning: damaged checkpoint, not used: {damages[-1]}")
    if checkpoints:
        raise ValueError(
            f"all checkpoints of this run are damaged ({'; '.join(damages)}). Restore one, or start over "
            "with `checkpoint.resume=never` or another `name`"
        )
    return None


def checkpoint_damage(checkpoint: Path) -> str | None:
    """Describe the first damage found in ``checkpoint``; None where there is none."""
    return find_damage(checkpoint, must_have=(STATE,))


def step_of(checkpoint: Path) -> int:
    """Return the step whose weights the directory ``checkpoint`` holds."""
    return int(checkpoint.name.split("_")[1])
