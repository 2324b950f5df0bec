"""Reading a checkpoint back: whether it belongs to this run, and the point where the run resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from grpo_dist.algorithms.moments import Moments
from grpo_dist.config import Config, PolicyConfig
from grpo_dist.config.files import dump_config
from grpo_dist.config.secrets import HIDDEN
from grpo_dist.data.columns import ByUid
from grpo_dist.data.order import OrderState
from grpo_dist.health import HealthState
from grpo_dist.loop.progress import PipelineState, Progress, SampledBatch, ScheduleState
from grpo_dist.observe.samples import read_groups
from grpo_dist.runs.checkpoint import STATE, CheckpointState
from grpo_dist.runs.identity import (
    Change,
    DataOrigin,
    changes,
    check_code,
    columns_digest,
    data_digest,
    describe,
    digest_run_code,
    fingerprint,
)
from grpo_dist.types import Prompt, Sampling


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes. ``checkpoint`` is None at the beginning of the run."""

    checkpoint: Path | None = None
    progress: Progress = field(default_factory=Progress)
    wandb_id: str | None = None

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.progress.step

    def __str__(self) -> str:
        return str(self.checkpoint or "the beginning of the run")


def load_state(checkpoint: Path, config: Config) -> CheckpointState:
    """Return the driver's state from ``checkpoint``.

    ``config`` is the run's identity. For a stage of a pipeline it names the other stages, where the run's own
    configuration has their directories, which may move.

    Raises ValueError when the checkpoint is damaged, or when a run of ``config`` would give other results.
    """
    try:
        state = CheckpointState(**json.loads((checkpoint / STATE).read_text()))
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
    changed = changes_since(checkpoint, config)
    # None: unknown, a value is masked or config.yaml is unreadable. Empty: the fingerprint differs only
    # because another version of grpo-dist computed it.
    may_change = changed is not None and HIDDEN not in dump_config(config)
    decisive = None
    if may_change:
        kept = [c for c in changed or () if c.decides(config) and not _is_same_stage(c)]
        decisive = [c for c in kept if not c.is_recorded]
    if state.fingerprint != fingerprint(config) and decisive != []:
        named = f" ({describe(decisive)}: {decisive[0].reason})" if decisive else ""
        raise ValueError(
            f"{checkpoint}: made with another configuration{named}; "
            "`steps` (with a constant learning rate), learning rate, KL weight (above 0), clip range, length "
            "limits, evaluation, health, checkpoint, tracking, cluster, numbers and layout of workers may "
            "change on resume. Restore the old values, choose another `name`, or set "
            "`checkpoint.resume=never`"
        )
    _check_sharding(checkpoint, changed or [], config.policy)
    hashes = digest_run_code(config.user_components, config.rewards, config.data)
    check_code(checkpoint, state.changed_code(hashes), config.checkpoint)
    return _apply_new_settings(state, changed or [], config)


def _apply_new_settings(state: CheckpointState, changed: Sequence[Change], config: Config) -> CheckpointState:
    """Return ``state`` without values that a recorded change replaces: the KL weight, and the length limit of
    batches that are launched already.
    """
    keys = {change.key for change in changed if change.is_recorded}
    if "algorithm.kl.coef" in keys:
        state = replace(state, kl_coef=None)
    if any(key.startswith("sampling.max_new_tokens") for key in keys):
        limit = config.sampling.longest
        sampling = {
            batch: sampled | {"max_new_tokens": min(sampled["max_new_tokens"], limit)}
            for batch, sampled in state.sampling.items()
        }
        state = replace(state, sampling=sampling, schedule={**state.schedule, "max_new_tokens": None})
    return state


def recorded_changes(since: Sequence[Change] | None, step: int) -> Iterator[str]:
    """Yield a message for each setting that the run has another value of after ``step``."""
    for change in since or ():
        if change.is_recorded or change.key.partition(".")[0] in ("evaluation", "health"):
            yield f"after step {step} `{change.key}` = {change.now}, before {change.was}"


def _is_same_stage(change: Change) -> bool:
    """Return whether the identity of a pipeline stage now names the other stage whose directory its run had,
    `NN_NAME` in the pipeline's: no difference.
    """
    now = str(change.now)
    name = now.removeprefix("stage:").partition("/")[0]
    parts = Path(str(change.was)).parts
    return now.startswith("stage:") and any(part.partition("_")[2] == name for part in parts)


def other_layout(since: Sequence[Change] | None) -> str:
    """Describe the changes of layout, of `changes_since`, for a message; "" without any."""
    changed = [change for change in since or () if change.is_layout]
    return f", with another layout ({describe(changed)}): results differ by rounding only" if changed else ""


def other_code(checkpoint: Path, hashes: Mapping[str, str]) -> str:
    """Describe changes of the user's code since ``checkpoint`` was written, for a message; "" without any.
    ``hashes``: `digest_run_code` now.
    """
    state = CheckpointState(**json.loads((checkpoint / STATE).read_text()))
    changed = state.changed_code(hashes)
    return f"warning: your own code has changed since: {', '.join(changed)}" if changed else ""


def _check_sharding(checkpoint: Path, changed: list[Change], policy: PolicyConfig) -> None:
    """Raise ValueError where the policy's sharding has changed, and its state is or was on NVMe disks, or is
    in 8 bits.
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
    """Return the changes from the configuration in ``checkpoint``; None where that is unreadable."""
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
    return ResumePoint(checkpoint, load_progress(checkpoint, state, prompts), state.wandb_id)


def check_data(
    checkpoint: Path, state: CheckpointState, prompts: Sequence[Prompt], origin: DataOrigin | None = None
) -> None:
    """Raise ValueError where the checkpoint was made with other training prompts, or columns of them.

    ``origin``: of ``prompts``; it tells other rows from rows that are tokenised otherwise.
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
            f"{checkpoint}: made with other training prompts; the files behind `data.train` have changed. "
            "Restore them, choose another `name`, or set `checkpoint.resume=never`"
        )
    if state.columns is not None and state.columns != columns_digest(prompts):
        raise ValueError(
            f"{checkpoint}: made with other columns of the training prompts, which rewards, environments and "
            "pools read; the rows behind `data.train` have changed. Restore them, choose another `name`, or "
            "set `checkpoint.resume=never`"
        )


def load_progress(checkpoint: Path, state: CheckpointState, prompts: Sequence[Prompt]) -> Progress:
    """Return the driver's progress: all its state but the weights, with the batches sampled ahead."""
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
    best = None if state.best is None else (int(state.best[0]), float(state.best[1]))
    return Progress(state.step, pipeline, health, state.kl_coef, state.unassessed, rewards, due, best)


def order_state(state: CheckpointState) -> OrderState:
    """Return the state of the prompt order."""
    return TypeAdapter(OrderState).validate_python(dict(state.order))
