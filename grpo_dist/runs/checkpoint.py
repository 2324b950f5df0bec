"""Checkpoints: what a step directory holds, how it is published atomically, found again, and pruned.

    checkpoints/step_000020/
        policy/         DeepSpeed's model, optimiser and schedule state, one part per rank
        reference.safetensors  the reference, where it is renewed during the run
        ahead/*.parquet finished groups of batches launched ahead of training (max_staleness > 0): of whole
                        batches, and of those that were begun
        state.json      step, fingerprints of configuration and data, KL coefficient, prompts
                        prompts taken, their order, tracker run id, what health watches remember, moments of
                        all rewards so far
        config.yaml     the configuration of the run
        manifest.json   size and checksum of every other file

A directory is written under a temporary name, flushed, and renamed; one that carries its final name is
complete. Whether it still is what was written, the manifest tells before it is loaded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from grpo_dist.algorithms.moments import Moments
from grpo_dist.config import Config
from grpo_dist.config.files import dump_config
from grpo_dist.data.order import OrderState
from grpo_dist.health.state import HealthState
from grpo_dist.loop.progress import Progress, SampledBatch
from grpo_dist.observe.samples import read_groups, write_groups
from grpo_dist.policy.offload import offload_devices
from grpo_dist.runs.identity import Change, changes, fingerprint, told
from grpo_dist.runs.manifest import find_damage, write_manifest
from grpo_dist.runtime.concurrency import deadline, in_thread
from grpo_dist.runtime.files import clear, exchange, flush, publish
from grpo_dist.secrets import HIDDEN
from grpo_dist.types import Prompt
from grpo_dist.workers import Workers

CHECKPOINTS = "checkpoints"  # in a run directory
REFERENCE = "reference.safetensors"
_STATE = "state.json"
_PARTIAL = ".partial_"
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class State:
    """Driver state of a checkpoint. ``step`` steps are done; the next batch trained on is number ``step``."""

    step: int
    fingerprint: str  # of the configuration keys that a resumed run must share
    data: str  # digest of the training prompts, in order
    kl_coef: float | None = None
    taken: Mapping[str, list[int]] = field(default_factory=dict)
    order: Mapping[str, Any] = field(default_factory=dict)
    wandb_id: str | None = None
    health: Mapping[str, Any] = field(default_factory=dict)
    unassessed: bool = False
    rewards: Mapping[str, Any] = field(default_factory=dict)  # moments, for `algorithm.reward_norm` running


@dataclass(frozen=True)
class Place:
    """Where a run goes on. ``checkpoint`` None: at its beginning."""

    checkpoint: Path | None = None
    step: int = 0
    progress: Progress = field(default_factory=Progress)
    wandb_id: str | None = None

    def __str__(self) -> str:
        return str(self.checkpoint or "the beginning of the run")


class Checkpoints:
    """The checkpoint directory of one run. Only directories that bear its own names are ever deleted."""

    def __init__(
        self,
        directory: Path,
        config: Config,
        prompts: Sequence[Prompt],
        *,
        identity: Config | None = None,
        wandb_id: str | None = None,
    ) -> None:
        """``identity``: see `load_state`."""
        self._directory, self._config, self._wandb_id = directory, config, wandb_id
        self._fingerprint, self._data = fingerprint(identity or config), data_digest(prompts)
        self._writing: asyncio.Task[None] | None = None
        self._saves = count()

    async def save(self, step: int, workers: Workers, progress: Progress) -> None:
        """Take the state of ``step``; it is written beside the steps that follow, unless
        `checkpoint.background` is off. Raises what went wrong with the one before.
        """
        await self.settle()
        remove_partial(self._directory)  # of saves that were given up
        final = self._directory / f"step_{step:06d}"
        # A name of its own: a save that was given up may still be at work in its own directory.
        partial = self._directory / f"{_PARTIAL}{final.name}_{next(self._saves)}"
        partial.mkdir(parents=True)
        beside = self._config.checkpoint.background
        await workers.policy.save(partial / "policy", beside=beside)
        if workers.reference is not None and self._config.reference.refresh_every:
            async with deadline(
                self._config.cluster.timeouts.save_s,
                f"reference: checkpoint to {partial}",
                explain=workers.where_stuck,
            ):
                await workers.reference.save(partial / REFERENCE)
        finish = self._finish(step, partial, final, workers, progress)
        self._writing = asyncio.create_task(finish, name=f"checkpoint {step}")
        if not beside:
            await self.settle()

    async def settle(self) -> None:
        """Returns when the checkpoint that is being written is there. Raises what went wrong with it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def _finish(
        self, step: int, partial: Path, final: Path, workers: Workers, progress: Progress
    ) -> None:
        await workers.policy.saved()
        async with deadline(self._config.cluster.timeouts.save_s, f"checkpoint: {final} is published"):
            await in_thread(lambda: self._publish(step, partial, final, progress))

    def _publish(self, step: int, partial: Path, final: Path, progress: Progress) -> None:
        """In a thread: the loop goes on receiving samples."""
        for number, batch in progress.ahead.items():
            write_groups(partial / "ahead" / f"batch_{number:06d}.parquet", batch.groups)
            if batch.discarded:
                write_groups(partial / "ahead" / f"discarded_{number:06d}.parquet", batch.discarded)
        for number, groups in progress.begun.items():
            write_groups(partial / "ahead" / f"begun_{number:06d}.parquet", groups)
        state = State(
            step,
            self._fingerprint,
            self._data,
            progress.kl_coef,
            {str(batch): places for batch, places in progress.taken.items()},
            asdict(progress.order),
            self._wandb_id,
            asdict(progress.health),
            progress.unassessed,
            asdict(progress.rewards),
        )
        (partial / _STATE).write_text(json.dumps(asdict(state), indent=1))
        (partial / "config.yaml").write_text(dump_config(self._config))
        write_manifest(partial)
        flush(partial)  # before what it replaces goes
        if final.exists() and _damage(final) is None:
            # Of the same step, which may have finished fewer groups: there is never none of it. Where names
            # cannot be exchanged, the one before stays.
            exchange(partial, final)
            shutil.rmtree(partial)
            return
        clear(final)
        publish(partial, final)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Steps later than ``step`` are of damaged checkpoints that the run went back from: they do not
        count, and each is replaced when the run comes to it.
        """
        own = [found for found in list_checkpoints(self._directory) if _step(found) <= step]
        for old in own[: -self._config.checkpoint.keep]:
            if not old.is_symlink():  # somebody else's way of keeping it
                shutil.rmtree(old)


def remove_partial(directory: Path) -> None:
    """What killed and failed saves have left; nobody saves there now."""
    for left in directory.glob(f"{_PARTIAL}*"):
        if left.is_symlink() or left.is_file():  # not a save's: of somebody who wants it to write elsewhere
            left.unlink()
        shutil.rmtree(left, ignore_errors=True)  # who gave up may still be writing in it


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((p for p in found if _NAME.fullmatch(p.name)), key=_step)


def newest_whole(directory: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is what was written; ``say`` is told of newer ones that are not. None: there
    are no checkpoints. Raises ValueError when all are damaged.
    """
    found = list_checkpoints(directory)
    damages = []
    for checkpoint in reversed(found):
        damage = _damage(checkpoint)
        if damage is None:
            return checkpoint
        damages.append(f"{checkpoint}: {damage}")
        say(f"warning: damaged checkpoint, not used: {damages[-1]}")
    if found:
        raise ValueError(
            f"no checkpoint of this run is whole ({'; '.join(damages)}). Restore one, or begin again with "
            "`checkpoint.resume=never` or another `name`"
        )
    return None


def _damage(checkpoint: Path) -> str | None:
    """The first thing that is not as it was written, in words; None: all is."""
    return find_damage(checkpoint, must_have=(_STATE,))


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("_")[1])


def load_state(checkpoint: Path, config: Config) -> State:
    """Raises ValueError when the checkpoint is damaged or belongs to a run whose results would differ.

    ``config`` is the run's identity: of a stage of a pipeline, the configuration that names other stages
    where the run itself has their directories, which may move.
    """
    try:
        state = State(**json.loads((checkpoint / _STATE).read_text()))
    except TypeError as error:
        raise ValueError(
            f"{checkpoint}: made by another version of grpo-dist ({error}); go on with that one, choose "
            "another `name`, or set `checkpoint.resume=never`"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{checkpoint}: state.json cannot be read ({error}); delete this directory to resume from the "
            f"one before"
        ) from error
    changed = _changes(checkpoint, config)
    if state.fingerprint != fingerprint(config) and (deciding := _deciding(changed, config)) != []:
        # A stage of a pipeline names others where its run had their directories: that is no difference.
        named = [change for change in deciding or () if "stage:" not in str(change.now)]
        raise ValueError(
            f"{checkpoint}: made with another configuration{f' ({told(named)})' if named else ''}; `steps` "
            "(with a constant learning rate), who computes what and in which portions, evaluation, "
            "checkpoint, tracking, cluster and most health settings may change on resume. Restore the old "
            "values, choose another `name`, or set `checkpoint.resume=never`"
        )
    _check_disks(checkpoint, changed or [], config)
    return state


def other_layout(checkpoint: Path, config: Config) -> str:
    """What of ``config`` computes the same otherwise than the run that wrote ``checkpoint``, for a message;
    empty where nothing does.
    """
    changed = [change for change in _changes(checkpoint, config) or () if change.is_layout]
    return f", with another layout ({told(changed)}): computed alike but for rounding" if changed else ""


def _deciding(changed: list[Change] | None, config: Config) -> list[Change] | None:
    """Those that make ``config`` another run; none where the fingerprint is of another version of grpo-dist.
    None: nobody can tell, for a value is hidden or nothing can be read.
    """
    if changed is None or HIDDEN in dump_config(config):
        return None
    return [change for change in changed if change.decides(config)]


def _check_disks(checkpoint: Path, changed: list[Change], config: Config) -> None:
    """Raises ValueError where others than wrote the policy's state are to read it, and it is on disks of
    theirs, or shall be.
    """
    other = [change for change in changed if change.is_sharding]
    if other and "nvme" in (*offload_devices(config.policy).values(), *(change.was for change in other)):
        raise ValueError(
            f"{checkpoint}: {told(other)}, but states on NVMe disks (`policy.offload`) cannot be dealt out "
            "anew; restore the old values, choose another `name`, or set `checkpoint.resume=never`"
        )


def _changes(checkpoint: Path, config: Config) -> list[Change] | None:
    """From the configuration that ``checkpoint`` was made with; None where that cannot be read."""
    try:
        return changes((checkpoint / "config.yaml").read_text(), config)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def load_place(checkpoint: Path | None, state: State | None, prompts: Sequence[Prompt]) -> Place:
    """The place that ``checkpoint`` with its ``state`` is of, or the beginning where there is none. Raises
    ValueError where it was made with other training prompts.
    """
    if checkpoint is None or state is None:
        return Place()
    check_data(checkpoint, state, prompts)
    return Place(checkpoint, state.step, load_progress(checkpoint, state, prompts), state.wandb_id)


def check_data(checkpoint: Path, state: State, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError when the training prompts are not those the checkpoint was made with."""
    if state.data != data_digest(prompts):
        raise ValueError(
            f"{checkpoint}: made with other training prompts; the files behind `data.train` have changed. "
            "Restore them, choose another `name`, or set `checkpoint.resume=never`"
        )


def load_progress(checkpoint: Path, state: State, prompts: Sequence[Prompt]) -> Progress:
    """What the driver knew besides the weights; batches sampled ahead by number."""
    by_uid = {p.uid: p for p in prompts}
    whole, discarded, begun = (
        {int(file.stem.split("_")[1]): read_groups(file, by_uid) for file in checkpoint.glob(f"ahead/{kind}")}
        for kind in ("batch_*", "discarded_*", "begun_*")
    )
    ahead = {batch: SampledBatch(groups, discarded.get(batch, [])) for batch, groups in whole.items()}
    taken = {int(batch): places for batch, places in state.taken.items()}
    health = TypeAdapter(HealthState).validate_python(dict(state.health))
    rewards = TypeAdapter(Moments).validate_python(dict(state.rewards))
    return Progress(ahead, state.kl_coef, taken, order_state(state), health, begun, state.unassessed, rewards)


def order_state(state: State) -> OrderState:
    """What the order of prompts remembered."""
    return TypeAdapter(OrderState).validate_python(dict(state.order))


def data_digest(prompts: Sequence[Prompt]) -> str:
    """Of problems, answers and token ids, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.uid.encode())
        digest.update(prompt.token_ids.tobytes())
    return digest.hexdigest()[:16]
