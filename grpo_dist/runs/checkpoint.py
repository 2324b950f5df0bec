"""The checkpoints of a run: the content of a step directory, how it is written, published, found and pruned,
and whether and where a run resumes from it.

    checkpoints/step_000020/
        policy/         DeepSpeed's model, optimiser and schedule state, one part per rank
        reference.safetensors  the reference, if it is refreshed during the run
        ahead/*.parquet finished groups of batches launched ahead of training (max_staleness > 0), of whole
                        and of unfinished batches
        state.json      step, fingerprints of configuration, data, their origin and columns, KL coefficient,
                        prompts taken and their order, sampling of launched batches, hashes of user code
                        and models, tracker run id, state of the health checks, moments of all rewards so
                        far, unfinished evaluations
        config.yaml     the configuration of the run
        manifest.json   size and checksum of every other file

A directory is written under a temporary name, flushed, and renamed: a final name means that it is complete.
The manifest reveals later damage; it is checked before a checkpoint is loaded.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path, PurePosixPath
from threading import Event
from typing import IO, Any

import yaml
from pydantic import TypeAdapter

from grpo_dist.algorithms.moments import Moments
from grpo_dist.config import CheckpointConfig, Config, PolicyConfig
from grpo_dist.config.files import dump_config
from grpo_dist.config.sampling import AdaptiveLength
from grpo_dist.config.secrets import secret_keys
from grpo_dist.data.columns import ByUid
from grpo_dist.data.order import OrderState
from grpo_dist.errors import UserError
from grpo_dist.health import HealthState
from grpo_dist.loop.progress import PipelineState, Progress, SampledBatch, ScheduleState, ends_early
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.plugins.user_code import changed_code
from grpo_dist.runs.identity import (
    Change,
    DataOrigin,
    changes,
    columns_digest,
    data_digest,
    describe,
    digest_run_code,
    fingerprint,
)
from grpo_dist.runs.run_directory import MODEL, finished_steps, free_directory, make_free_directory
from grpo_dist.runtime.concurrency import deadline, run_in_thread
from grpo_dist.runtime.files import clear, exchange, flush, publish
from grpo_dist.types import Prompt, Sampling
from grpo_dist.workers import Workers

logger = logging.getLogger("grpo_dist")

MANIFEST = "manifest.json"
_BLOCK = 1 << 22
_LARGEST = 64 * 2**20  # bytes; no run writes a larger manifest
_THREADS = 8  # hashing releases the GIL
CHECKPOINTS = "checkpoints"  # in a run directory
REFERENCE = "reference.safetensors"
STATE = "state.json"
_MODEL = "model.path"
_PARTIAL = ".partial_"
_NAME = re.compile(r"step_(\d{6,})")


def write_manifest(directory: Path) -> None:
    """Write the size and BLAKE2b of every file below ``directory`` to its manifest.json."""
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_digest, files))
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "blake2b": digest}
        for path, digest in zip(files, digests, strict=True)
    }
    (directory / MANIFEST).write_text(json.dumps({"files": listed}, indent=1))


def checkpoint_damage(directory: Path) -> str | None:
    """Describe the first file of a checkpoint that differs from its manifest; None where all match. Never
    raises and never blocks, whatever the directory holds.
    """
    try:
        listed = json.loads(_read_text(directory / MANIFEST))["files"]
        expected = [(name, entry["bytes"], entry["blake2b"]) for name, entry in listed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if STATE not in [name for name, _, _ in expected]:
        return f"{MANIFEST} does not list {STATE}"
    # Sizes first: they cost nothing, and most damaged files are short.
    for name, size, _ in expected:
        if problem := _find_mismatch(directory, name, size):
            return f"{json.dumps(name)[1:-1]} {problem}"
    with ThreadPoolExecutor(_THREADS) as pool:
        checked = pool.map(lambda item: (item[0], _find_change(directory / item[0], item[2])), expected)
        return next((f"{json.dumps(name)[1:-1]} {why}" for name, why in checked if why), None)


def _read_text(path: Path) -> str:
    """Read a regular file of limited size. Raises OSError or ValueError for any other file."""
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


def _find_mismatch(directory: Path, name: str, size: Any) -> str | None:
    """Describe how path, type or size of a file differ from its entry; None if they do not."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return "is listed, but lies outside the directory"
    try:
        status = (directory / name).stat()
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return "is missing"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return None if status.st_size == size else f"has {status.st_size} bytes instead of {size}"


def _find_change(path: Path, digest: Any) -> str | None:
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
    """The driver's part of a checkpoint, state.json: ``step`` steps are done, and batch ``step`` is next."""

    step: int
    fingerprint: str  # hash of the configuration keys that a resumed run must keep
    data: str  # digest of the training prompts, in order
    kl_coef: float | None = None
    taken: Mapping[str, list[int]] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)
    wandb_id: str | None = None
    health: Mapping[str, Any] = field(default_factory=dict)
    unassessed: bool = False
    rewards: Mapping[str, Any] = field(default_factory=dict)  # moments, for `algorithm.reward_norm` running
    evaluations: Sequence[int] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # settings of launched batches, by number
    schedule: Mapping[str, Any] = field(default_factory=dict)  # adapted values of `sampling`
    lengths: Mapping[str, Any] = field(default_factory=dict)  # trained so far, with `batch.order` completion
    code: Mapping[str, str] = field(default_factory=dict)  # see `identity.digest_run_code`
    columns: str | None = None  # digest of the training prompts' columns
    origin: Mapping[str, Any] | None = None  # `DataOrigin` of the training prompts
    best: Sequence[float] | None = None  # step and value, with `checkpoint.keep_best`
    models: Mapping[str, str] = field(default_factory=dict)  # `RunInputs.model_digests` at the start


class Checkpoints:
    """The checkpoint directory of one run. It deletes only directories with names of checkpoints."""

    def __init__(
        self,
        directory: Path,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        identity: Config | None = None,
        wandb_id: str | None = None,
        origin: DataOrigin | None = None,
        models: Mapping[str, str] | None = None,
    ) -> None:
        """``identity``: see `load_state`. ``origin``: of ``prompts``, see `check_data`. ``models``: see
        `check_models`.
        """
        self._models = models or {}
        self._origin = None if origin is None else asdict(origin)
        self._directory, self._config, self._wandb_id = directory, config, wandb_id
        self._fingerprint = fingerprint(identity or config)
        self._data, self._columns = data_digest(prompts), columns_digest(prompts)
        self._code, self._warned_of_code = digest_run_code(config), False
        self._writing: asyncio.Task[None] | None = None
        self._saves = count()

    async def save(self, step: int, workers: Workers, progress: Progress) -> None:
        """Save the state after ``step`` steps, writing while the next steps run unless
        `checkpoint.background` is off. Raises the error of the previous save, if that failed.
        """
        await self.settle()
        remove_partial(self._directory)  # from abandoned saves
        final = self._directory / f"step_{step:06d}"
        # Each save has its own name: an abandoned save may still write into its directory.
        partial = make_free_directory(self._directory / f"{_PARTIAL}{final.name}_{next(self._saves)}")
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
        except BaseException:  # also when the save is cancelled: the thread goes on
            abandoned.set()
            raise

    def _publish(self, step: int, partial: Path, final: Path, progress: Progress, abandoned: Event) -> None:
        """Write the driver's part and rename the directory, unless the save is ``abandoned`` first. Runs in a
        thread: the loop keeps receiving.
        """
        self._warn_of_changed_code()
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
            self._models,
        )
        (partial / STATE).write_text(json.dumps(asdict(state), indent=1))
        (partial / "config.yaml").write_text(dump_config(self._config))
        write_manifest(partial)
        flush(partial)  # before the checkpoint it replaces is removed
        unharmed = final.exists() and checkpoint_damage(final) is None
        if abandoned.is_set():  # the run went back to the checkpoint before, and repeats the steps
            return
        if unharmed:
            # An earlier checkpoint of the step, perhaps with fewer finished groups. With an exchange, one of
            # them always exists. If the file system cannot exchange names, the earlier one stays.
            exchange(partial, final)
            _discard(partial)  # removes only the link if a user has moved the earlier one
            return
        clear(final)
        publish(partial, final)
        self._prune(step, best=progress.best[0] if progress.best else None)

    def _warn_of_changed_code(self) -> None:
        """Warn once where the user's code is no longer that of the start: later processes import it."""
        if self._warned_of_code:
            return
        try:
            changed = changed_code(self._code, digest_run_code(self._config))
        except (OSError, ValueError) as error:  # a file or a package is gone
            changed = [str(error)]
        if changed:
            self._warned_of_code = True
            logger.warning(
                "your own code has changed during the run: %s. Processes that the run replaces, such as "
                "graders, run the new code, so the numbers of one step may come from two programs; restore "
                "the code, and try changes in a copy of it",
                ", ".join(changed),
            )

    def _prune(self, step: int, *, best: int | None) -> None:
        """Delete all but the newest `checkpoint.keep` checkpoints up to ``step``, and step ``best``.
        Later ones are damaged: the run resumed from before them, and replaces each when it gets there.
        """
        checkpoints = [path for path in list_checkpoints(self._directory) if step_of(path) <= step]
        for old in checkpoints[: -self._config.checkpoint.keep]:
            if step_of(old) != best and not old.is_symlink():  # a link is a user's way to keep it
                # Readers find it whole or not at all. The next save deletes what a kill leaves of it.
                doomed = free_directory(old.with_name(f"{_PARTIAL}deleted_{old.name}"))
                old.rename(doomed)
                _discard(doomed)


def remove_partial(directory: Path) -> None:
    """Delete the remains of killed and failed saves in ``directory``. No save may be running there."""
    for left in directory.glob(f"{_PARTIAL}*"):
        _remove(left)  # an abandoned save may still be writing into it


def _remove(path: Path) -> None:
    """Delete as much of ``path`` as is possible. The target of a link stays."""
    if path.is_symlink() or path.is_file():  # a user's link, to write saves elsewhere
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _discard(replaced: Path) -> None:
    """Delete a checkpoint that a newer one replaces. If that fails, only warn: the newer one is complete."""
    _remove(replaced)
    if os.path.lexists(replaced):
        logger.warning(
            "%s: a replaced checkpoint, which cannot be deleted: its files are in use or write-protected; "
            "the next save tries again",
            replaced,
        )


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


def step_of(checkpoint: Path) -> int:
    """Return the step whose weights the directory ``checkpoint`` holds."""
    return int(checkpoint.name.split("_")[1])


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes. ``checkpoint`` is None at the beginning of the run. ``models``:
    `RunInputs.model_digests` when the run began.
    """

    checkpoint: Path | None = None
    progress: Progress = field(default_factory=Progress)
    wandb_id: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Return how many steps are done."""
        return self.progress.step

    def __str__(self) -> str:
        return str(self.checkpoint or "the beginning of the run")


def load_state(checkpoint: Path, config: Config) -> CheckpointState:
    """Return the driver's state from ``checkpoint``.

    ``config`` is the run's identity. For a pipeline stage it names other stages where the run's configuration
    has their directories, which may move.

    Raises ValueError when the checkpoint is damaged, or when a run of ``config`` would give other results.
    """
    state = read_state(checkpoint)
    changed = changes_since(checkpoint, config)
    if state.fingerprint != fingerprint(config):
        _check_changes(checkpoint, changed, config)
    _check_sharding(checkpoint, changed or [], config.policy)
    return _apply_new_settings(state, changed or [], config)


def read_state(checkpoint: Path) -> CheckpointState:
    """Return the driver's state from ``checkpoint`` of any run. Raises ValueError if it cannot be read."""
    try:
        return CheckpointState(**json.loads((checkpoint / STATE).read_text()))
    except TypeError as error:
        raise ValueError(
            f"{checkpoint}: made by another version of grpo-dist ({error}); resume with that version, choose "
            "another `name`, or set `checkpoint.resume=never`"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{checkpoint}: state.json cannot be read ({error}); delete this directory to resume from the "
            "checkpoint before it"
        ) from error


def check_code(checkpoint: Path, state: CheckpointState, config: Config) -> None:
    """Raise ValueError where the user's code is another than that of ``checkpoint`` with its ``state``, and
    `checkpoint.changed_code` is refuse. Within a job it does not matter: its processes have imported theirs.
    """
    code = changed_code(state.code, digest_run_code(config))
    if code and config.checkpoint.changed_code == "refuse":
        raise ValueError(
            f"{checkpoint}: your own code has changed since it was written: {', '.join(code)}. The numbers "
            "of the run would come from two programs. Restore the code, choose another `name`, or set "
            "`checkpoint.changed_code=warn` or `checkpoint.resume=never`"
        )


def _check_changes(checkpoint: Path, changed: Sequence[Change] | None, config: Config) -> None:
    """Raise ValueError unless a resumed run may make all changes. ``changed``: see `changes_since`.

    If there are none, only another version of grpo-dist computed another fingerprint.
    """
    real = [c for c in changed or () if c.decides(config) and not _is_same_stage(c)]
    decisive = [c for c in real if not c.is_recorded]
    keys = (Change(key, None, None) for key in secret_keys(config.model_dump(mode="json")))
    secret = next((c.key for c in keys if c.decides(config)), None)
    if secret is not None and not decisive:
        raise ValueError(
            f"{checkpoint}: made with another configuration; what has changed is unknown, as `{secret}` is a "
            "secret, which checkpoints do not hold. Restore the old values, or choose another `name` and put "
            "the secret into the environment"
        )
    if changed is None or decisive:
        named = f" ({describe(decisive)}: {decisive[0].reason})" if decisive else ""
        raise ValueError(
            f"{checkpoint}: made with another configuration{named}; "
            "`steps` (with a constant learning rate), learning rate, KL weight (above 0), clip range, length "
            "limits, evaluation and its sets, paths of the same training data, health, checkpoint, tracking, "
            "cluster, numbers and layout of workers may change on resume. Restore the old values, choose "
            "another `name`, or set `checkpoint.resume=never`"
        )


_BEST_OF = (  # what an evaluation measures, by key prefix
    "checkpoint.keep_best.", "data.eval.", "evaluation.temperature.", "evaluation.top_p.",
    "evaluation.top_k.", "evaluation.max_new_tokens.",
)  # fmt: skip


def _apply_new_settings(state: CheckpointState, changed: Sequence[Change], config: Config) -> CheckpointState:
    """Return ``state`` without values that a change replaces: the KL weight, the length limit of launched
    batches, and the best evaluation, where another set, setting or metric is compared. An adaptive length
    stays as far as its new limits allow.
    """
    if any(f"{change.key}.".startswith(_BEST_OF) or change.is_of_source_rewards for change in changed):
        state = replace(state, best=None)
    keys = {change.key for change in changed if change.is_recorded}
    if "algorithm.kl.coef" in keys:
        state = replace(state, kl_coef=None)
    if any(key.startswith("sampling.max_new_tokens") for key in keys):
        limit, setting = config.sampling.longest, config.sampling.max_new_tokens
        length = None
        if isinstance(setting, AdaptiveLength) and (was := state.schedule.get("max_new_tokens")):
            length = min(max(was, setting.start), setting.largest)
        sampling = {
            batch: sampled | {"max_new_tokens": min(sampled["max_new_tokens"], limit)}
            for batch, sampled in state.sampling.items()
        }
        state = replace(state, sampling=sampling, schedule={**state.schedule, "max_new_tokens": length})
    return state


def recorded_changes(since: Sequence[Change] | None, step: int) -> Iterator[str]:
    """Yield a message for each setting with another value after ``step``."""
    for change in since or ():
        # Of a held-out set or its reward that is new or gone, the path or function says so.
        is_set = (change.key.startswith("data.eval.") or change.is_of_source_rewards) and (
            change.key.endswith((".path", ".function")) or None not in (change.was, change.now)
        )
        if is_set or change.is_recorded or change.key.startswith(("evaluation.", "health.")):
            yield f"after step {step} `{change.key}` = {change.now}, before {change.was}"


def _is_same_stage(change: Change) -> bool:
    """Return whether a pipeline stage now names another stage by name, where its run had that stage's
    directory, `NN_NAME` in the pipeline's: no difference.
    """
    now = str(change.now)
    name = now.removeprefix("stage:").partition("/")[0]
    parts = Path(str(change.was)).parts
    return now.startswith("stage:") and any(part.partition("_")[2] == name for part in parts)


def other_layout(since: Sequence[Change] | None) -> str:
    """Describe the layout changes in `changes_since`, for a message; "" without any."""
    changed = [change for change in since or () if change.is_layout]
    return f", with another layout ({describe(changed)}): results differ by rounding only" if changed else ""


def other_code(checkpoint: Path, hashes: Mapping[str, str]) -> str:
    """Describe changes of the user's code since ``checkpoint`` was written, for a message; "" without any.
    ``hashes``: `digest_run_code` now.
    """
    changed = changed_code(read_state(checkpoint).code, hashes)
    return f"warning: your own code has changed since: {', '.join(changed)}" if changed else ""


def _check_sharding(checkpoint: Path, changed: list[Change], policy: PolicyConfig) -> None:
    """Raise ValueError if the policy's sharding has changed, and its state is or was on NVMe disks, or is in
    8 bits.
    """
    other = [change for change in changed if change.is_sharding]
    what = "states on NVMe disks (`policy.offload`)"
    if policy.optimizer.name == "adamw_8bit":
        what = "averages in 8 bits (`policy.optimizer.name`)"
    elif "nvme" not in (
        policy.offload.optimizer, policy.offload.parameters, *(change.was for change in other),
    ):  # fmt: skip
        return
    if other:
        raise ValueError(
            f"{checkpoint}: {describe(other)}, but {what} cannot be resharded; restore the old values, "
            "choose another `name`, or set `checkpoint.resume=never`"
        )


def changes_since(checkpoint: Path, config: Config) -> list[Change] | None:
    """Return the changes since the configuration in ``checkpoint``; None if that is unreadable."""
    try:
        return changes((checkpoint / "config.yaml").read_text(), config)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def load_resume_point(
    checkpoint: Path | None,
    state: CheckpointState | None,
    prompts: Sequence[Prompt],
    origin: DataOrigin | None = None,
) -> ResumePoint:
    """Return the point of ``checkpoint`` with its ``state``, or the beginning without one. Raises ValueError
    as `check_data`.
    """
    if checkpoint is None or state is None:
        return ResumePoint()
    check_data(checkpoint, state, prompts, origin)
    return ResumePoint(checkpoint, load_progress(checkpoint, state, prompts), state.wandb_id, state.models)


def check_data(
    checkpoint: Path, state: CheckpointState, prompts: Sequence[Prompt], origin: DataOrigin | None = None
) -> None:
    """Raise ValueError where the checkpoint was made with other training prompts, or columns of them.

    ``origin``: of ``prompts``; it tells changed rows from a changed tokenisation.
    """
    if state.data != data_digest(prompts):
        if origin is not None and state.origin and state.origin["rows"] == origin.rows:
            changed = (
                "; ".join(origin.changes(state.origin["reading"])) or "the tokenizer gives them otherwise"
            )
            raise ValueError(
                f"{checkpoint}: made of the same rows, but with other tokens: {changed}. Restore that, "
                "choose another `name`, or set `checkpoint.resume=never`"
            )
        raise ValueError(
            f"{checkpoint}: made with other training prompts; the files behind `data.train`, or their paths, "
            "have changed. Restore them, choose another `name`, or set `checkpoint.resume=never`"
        )
    if state.columns is not None and state.columns != columns_digest(prompts):
        raise ValueError(
            f"{checkpoint}: made with other columns of the training prompts, which rewards, environments and "
            "pools read; the rows behind `data.train` have changed. Restore them, choose another `name`, or "
            "set `checkpoint.resume=never`"
        )


def check_models(
    checkpoint: Path, state: CheckpointState, models: Mapping[str, str], config: Config
) -> list[str]:
    """Return a warning for each frozen model with other weights than when the run began. ``models``:
    `RunInputs.model_digests` now. Raises ValueError if the checkpoint has adapters for other weights, except
    for those of a cold start, which differ by rounding if they are trained again.
    """
    changed = [key for key, digest in models.items() if state.models.get(key, digest) != digest]
    has_adapters = config.policy.lora is not None
    if _MODEL in changed and has_adapters and config.model.path != "sft":
        raise ValueError(
            f"{checkpoint}: `{_MODEL}` = {config.model.path} has other weights than when the run began, and "
            "the checkpoint has adapters for those. Restore the files (`model.revision` chooses a commit of "
            "a hub model), choose another `name`, or set `checkpoint.resume=never`"
        )
    return [
        f"warning: `{key}` has other weights than when the run began: from step {state.step} on, its "
        "log-probs are of another model; restore its files, or choose another `name`"
        for key in changed
        if key != _MODEL or has_adapters or (config.needs_reference and not config.reference.refresh_every)
    ]


def load_progress(checkpoint: Path, state: CheckpointState, prompts: Sequence[Prompt]) -> Progress:
    """Return the driver's progress: all state but the weights, with the batches sampled ahead."""
    by_uid = ByUid(prompts)
    whole, discarded, unfinished = (
        {int(file.stem.split("_")[1]): read_groups(file, by_uid) for file in checkpoint.glob(f"ahead/{kind}")}
        for kind in ("batch_*", "discarded_*", "begun_*")
    )
    ahead = {batch: SampledBatch(groups, discarded.get(batch, [])) for batch, groups in whole.items()}
    taken = {int(batch): indices for batch, indices in state.taken.items()}
    health = HealthState.from_json(state.health)
    rewards = TypeAdapter(Moments).validate_python(dict(state.rewards))
    adapter = TypeAdapter(Sampling)
    sampling = {int(batch): adapter.validate_python(sampling) for batch, sampling in state.sampling.items()}
    schedule = ScheduleState(**state.schedule)
    lengths = {name: (tokens, samples) for name, (tokens, samples) in state.lengths.items()}
    pipeline = PipelineState(ahead, unfinished, taken, order_state(state), sampling, schedule, lengths)
    due = tuple(state.evaluations)
    return Progress(state.step, pipeline, health, state.kl_coef, state.unassessed, rewards, due, _best(state))


def _best(state: CheckpointState) -> tuple[int, float] | None:
    return None if state.best is None else (int(state.best[0]), float(state.best[1]))


def order_state(state: CheckpointState) -> OrderState:
    """Return the state of the prompt order."""
    return TypeAdapter(OrderState).validate_python(dict(state.order))


def find_resume_state(
    config: Config, identity: Config, run_dir: Path, say: Callable[[str], None]
) -> tuple[Path | None, CheckpointState | None]:
    """Return the newest undamaged checkpoint of the run in ``run_dir`` and its state; None, None: a new run.

    ``say`` gets a warning for each damaged one. Raises ValueError if the checkpoint belongs to another run,
    the run is complete, or its export would delete anything but an earlier export.
    """
    resumes = config.checkpoint.resume == "auto"
    newest = newest_whole(run_dir / CHECKPOINTS, say) if resumes else None
    state = load_state(newest, identity) if newest else None
    if newest and state:
        check_code(newest, state, identity)
    check_unfinished(config, run_dir, state.step if state else 0)
    check_exportable(config.checkpoint, run_dir)
    return newest, state


def why_ended_early(config: Config, run_dir: Path) -> str:
    """Return why the finished run in ``run_dir`` ended before `steps`; "" if it did not, ``config`` lets it
    go on, or its last checkpoint cannot be read.
    """
    done = finished_steps(run_dir)
    checkpoint = run_dir / CHECKPOINTS / f"step_{done or 0:06d}"
    if done is None or done >= config.steps:
        return ""
    try:
        state = read_state(checkpoint)
    except ValueError:  # a resume says so, and uses the checkpoint before it
        return ""
    changed = changes_since(checkpoint, config) or []
    return ends_early(config, done, _best(_apply_new_settings(state, changed, config)))


def check_unfinished(config: Config, run_dir: Path, step: int) -> None:
    """Raise UserError if the run in ``run_dir``, with ``step`` steps done by its newest checkpoint (0: there
    is none), has nothing left to do, or would begin again in the directory of a complete run.
    """
    done, steps = finished_steps(run_dir), config.steps
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
    if done == step and (reason := why_ended_early(config, run_dir)):
        raise UserError(
            f"{run_dir}: the run is complete ({step} steps: {reason}); choose another `name`, change that "
            "setting to continue it, or set checkpoint.resume=never"
        )


def check_exportable(checkpoint: CheckpointConfig, run_dir: Path) -> None:
    """Raise UserError if the trained model would replace anything but an earlier export."""
    from grpo_dist.policy.full_weights import why_no_export  # imports torch, which a plan does without

    directory = run_dir / MODEL
    if checkpoint.export and (reason := why_no_export(directory)):
        raise UserError(
            f"{directory} is no earlier export of the run ({reason}), and the trained model takes its place "
            "at the end; move it away, choose another `name`, or set checkpoint.export=false"
        )
