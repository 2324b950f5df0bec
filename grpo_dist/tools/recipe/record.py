"""The record of a stage: `stage.json` in its directory, written atomically before and after the work.

A stage is complete if its record is complete and matches the current settings and inputs. The record contains
the settings, so that errors can name changes. Inputs are fingerprints: a hash of a file, or the id of an
earlier stage's completed record.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from grpo_dist.config import Config
from grpo_dist.config.differences import changes, flat, has_place
from grpo_dist.config.secrets import HIDDEN, masked
from grpo_dist.config.supervised import OPTIMIZER, SupervisedConfig
from grpo_dist.errors import expanded
from grpo_dist.runs.identity import FREE_SFT, Change, digest_run_code, digest_sampling_code, drop_layout
from grpo_dist.runtime.files import read_json, write_text
from grpo_dist.runtime.model_files import fingerprint
from grpo_dist.tools.recipe.config import Kind, ResolvedStage

FILE = "stage.json"

# Sections that do not affect a stage's result.
_PLACES = {"name", "output_dir", "checkpoint", "tracking", "cluster"}
_OF_STEPS = {
    "batch", "algorithm", "distillation", "demonstrations", "reference", "weight_sync", "steps",
    "max_staleness",
}  # fmt: skip
_UNUSED: dict[Kind, set[str]] = {
    "sft": _PLACES | _OF_STEPS | {"rejection"},
    "grpo": _PLACES | {"rejection"},
    "sample": _PLACES | _OF_STEPS | {"policy", "evaluation"},
}

# A resumed run may change these, but its data, measurements and length are part of the stage's result.
_OF_RESULTS = ("data.eval.", "data.train.", "demonstrations.data.", "evaluation.", "steps.", "rejection.")
# Keys of `rejection` that select among finished samples.
_CHOICE = {"min_reward", "keep_per_prompt", "max_pass_rate"}


@dataclass(frozen=True)
class StageRecord:
    stage: str
    kind: Kind
    settings: dict[str, Any]
    inputs: dict[str, str | None]
    state: Literal["started", "complete"] = "started"
    id: str = ""  # set on completion
    seconds: float = 0.0  # total working time over all starts
    # Evaluations (`eval/SET/pass@1` ...) of the initial model and of the result.
    before: dict[str, float | None] = field(default_factory=dict)
    after: dict[str, float | None] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)  # report.json of a sample stage
    template_date: str | None = None  # the chat templates' date, the same in every stage

    def completed(self, **results: Any) -> StageRecord:
        return replace(self, state="complete", id=uuid.uuid4().hex, **results)


def read_record(directory: Path) -> StageRecord | None:
    """Read the record; None if there is none. Raises ValueError for an invalid record."""
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        return StageRecord(**read_json(path))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: not the record of a stage ({error}); move {directory} away to redo the stage"
        ) from error


def write_record(directory: Path, record: StageRecord) -> None:
    write_text(directory / FILE, json.dumps(asdict(record), indent=1) + "\n")


def begin(stage: ResolvedStage, earlier: Mapping[str, StageRecord]) -> StageRecord:
    """Return a new record for a starting stage. ``earlier``: complete records by stage name."""
    day = stage.config.data.template_date
    return StageRecord(stage.name, stage.kind, settings(stage), inputs(stage, earlier), template_date=day)


def settings(stage: ResolvedStage) -> dict[str, Any]:
    """Return the settings that affect the result, with stages by name and *** for secrets."""
    return masked(_settings(stage))


def _settings(stage: ResolvedStage) -> dict[str, Any]:
    config = drop_layout(stage.symbolic.model_dump(mode="json", exclude=_UNUSED[stage.kind]))
    if stage.kind != "sft" and stage.config.model.path != "sft":
        config.pop("sft")
    if stage.kind == "sft":
        config["data"].pop("train")
        config["model"].pop("path")  # always sft
        for key in OPTIMIZER:  # `sft` has separate ones
            config["policy"]["optimizer"].pop(key)
        for key in FREE_SFT:
            config["sft"].pop(key)
    return config


def inputs(stage: ResolvedStage, earlier: Mapping[str, StageRecord]) -> dict[str, str | None]:
    """Return fingerprints of the files, directories and earlier stages that the stage reads.

    The fingerprint of an incomplete stage is None.
    """
    fingerprints: dict[str, str | None] = {}
    used = settings(stage)
    for key, value, _ in stage.symbolic.input_paths():
        section, name = key.split(".")[:2]
        if name not in (used.get(section) or ()):
            continue
        if value.startswith("stage:"):
            name = value.removeprefix("stage:").partition("/")[0]
            fingerprints[f"stage:{name}"] = earlier[name].id if name in earlier else None
        elif (local := expanded(value)).exists():
            fingerprints[value] = fingerprint(local)
    if stage.kind != "sft":
        config = stage.config
        digest = (
            digest_run_code(config)
            if stage.kind == "grpo"
            else digest_sampling_code(config.rollout, config.rewards, config.data)
        )
        fingerprints |= {f"own code {label}": code for label, code in digest.items()}
    whole = _settings(stage)
    if used != whole:  # a masked key that only looks secret, such as `end_token`, affects the result
        fingerprints[f"what {HIDDEN} stands for"] = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
    return fingerprints


def comparable(record: StageRecord, stage: ResolvedStage, state: str) -> StageRecord:
    """Return ``record`` without the settings that a stage in this ``state`` may change, and without the
    inputs that only they name.

    complete: settings without effect on results: profiles, probes, warnings. started: settings that select
    among finished samples, and settings that a resumed run may change (`identity.Change.decides`).
    """
    if state == "started" and record.kind == "sample":
        rejection = {k: v for k, v in record.settings["rejection"].items() if k not in _CHOICE}
        return replace(record, settings=record.settings | {"rejection": rejection})
    identity: Config = stage.symbolic
    if state == "started" and stage.kind == "sft":
        identity = SupervisedConfig.from_config(stage.symbolic)

    def decides(change: Change) -> bool:
        if state == "started":
            return change.decides(identity) and not change.is_recorded
        is_of_results = f"{change.key}.".startswith(_OF_RESULTS) or change.is_of_source_rewards
        return is_of_results or change.decides(identity)

    every = flat(record.settings)
    settings = {key: v for key, v in every.items() if decides(Change(key, v, v))}
    free = {str(v) for v in every.values()} - {str(v) for v in settings.values()}
    read = {name: digest for name, digest in record.inputs.items() if name not in free}
    return replace(record, settings=settings, inputs=read)


def differences(old: StageRecord, new: StageRecord, config: Config) -> list[str]:
    """Describe every changed setting and input: "`steps` was 40 and is 60". ``config``: the stage's now.

    A key added by a later version is not a change if it has its default.
    """
    before, now = flat(drop_layout(old.settings)), flat(new.settings)
    chosen = flat(config.model_dump(mode="json", exclude_defaults=True))
    added = {key for key in now if key not in chosen and not has_place(key, before)}
    changed = changes(before, {key: value for key, value in now.items() if key not in added})
    for name in dict.fromkeys([*old.inputs, *new.inputs]):
        if old.inputs.get(name) != new.inputs.get(name):
            stage = name.removeprefix("stage:")
            changed.append(
                f"stage `{stage}` was redone or is no longer complete"
                if stage != name
                else f"{name} has changed"
            )
    return changed
