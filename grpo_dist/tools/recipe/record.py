"""What a stage's directory says of the stage: `stage.json`, written atomically before and after the work.

A stage is done when its record says so and was made with these settings, from these inputs. Settings stand in
the record as they are, so that a refusal can name what has changed; an input stands as a fingerprint: of a
file its contents, of an earlier stage the id of the record its result was finished with.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from grpo_dist.config.differences import changes
from grpo_dist.rewards.registry import own_code
from grpo_dist.runs.identity import without_layout
from grpo_dist.runtime.cache import fingerprint
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.json_files import read_json
from grpo_dist.secrets import HIDDEN, masked
from grpo_dist.tools.recipe.config import Kind, ResolvedStage, paths

FILE = "stage.json"

# Sections that do not decide a stage's result.
_PLACES = {"name", "output_dir", "checkpoint", "tracking", "cluster"}
_NO_TRAINING = {"batch", "algorithm", "reference", "policy", "weight_sync", "steps", "max_staleness"}
_UNUSED: dict[Kind, set[str]] = {
    "sft": _PLACES | _NO_TRAINING | {"rejection", "model"},
    "grpo": _PLACES | {"rejection"},
    "sample": _PLACES | _NO_TRAINING | {"evaluation"},
}

# Of `rejection`: what chooses among samples that are there, and is applied to all of them at the end.
_CHOICE = {"min_reward", "keep_per_prompt", "prefer", "max_pass_rate"}


@dataclass(frozen=True)
class StageRecord:
    stage: str
    kind: Kind
    settings: dict[str, Any]
    inputs: dict[str, str | None]
    state: Literal["started", "complete"] = "started"
    id: str = ""  # of the completion
    seconds: float = 0.0  # of work, over all starts
    # Measures on held-out problems (`eval/SET/pass@1` ...) of the model begun with and of the result.
    before: dict[str, float | None] = field(default_factory=dict)
    after: dict[str, float | None] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)  # report.json of a sample stage

    def completed(self, **results: Any) -> StageRecord:
        return replace(self, state="complete", id=uuid.uuid4().hex, **results)


def read_record(directory: Path) -> StageRecord | None:
    """None where no stage was begun. Raises ValueError for a record that cannot be read."""
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        return StageRecord(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: not a record of a stage ({error}); move {directory} away to do the stage again"
        ) from error


def write_record(directory: Path, record: StageRecord) -> None:
    write_text(directory / FILE, json.dumps(asdict(record), indent=1) + "\n")


def begin(stage: ResolvedStage, earlier: Mapping[str, StageRecord]) -> StageRecord:
    """The record of a stage about to start. ``earlier``: complete ones, by stage name."""
    return StageRecord(stage.name, stage.kind, settings(stage), inputs(stage, earlier))


def settings(stage: ResolvedStage) -> dict[str, Any]:
    """What decides the stage's result, references to other stages by their names, *** for secrets."""
    return masked(_settings(stage))


def _settings(stage: ResolvedStage) -> dict[str, Any]:
    config = without_layout(stage.symbolic.model_dump(mode="json", exclude=_UNUSED[stage.kind]))
    if stage.kind != "sft" and stage.config.model.path != "sft":
        config.pop("sft")
    if stage.kind == "sft":
        config["data"].pop("train")
        config["sft"].pop("threads")
    return config


def inputs(stage: ResolvedStage, earlier: Mapping[str, StageRecord]) -> dict[str, str | None]:
    """Fingerprints of the local files and directories and of the earlier stages that the stage reads; None
    for a stage that is not complete.
    """
    found: dict[str, str | None] = {}
    used = settings(stage)
    for key, value, _ in paths(stage.symbolic):
        section, name = key.split(".")[:2]
        if name not in (used.get(section) or ()) or (key, value) == ("model.path", "sft"):
            continue
        if value.startswith("stage:"):
            name = value.removeprefix("stage:").partition("/")[0]
            found[f"stage:{name}"] = earlier[name].id if name in earlier else None
        elif (local := Path(value).expanduser()).exists():
            found[value] = fingerprint(local)
    for file in own_code(stage.config.rewards):
        found[str(file)] = fingerprint(file)
    whole = _settings(stage)
    if used != whole:  # a custom reward's `end_token` may pass for a secret, and decides
        found[f"what {HIDDEN} stands for"] = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
    return found


def sampled_with(record: StageRecord) -> StageRecord:
    """``record`` without the settings that its samples do not depend on."""
    if record.kind != "sample":
        return record
    rejection = {k: v for k, v in record.settings["rejection"].items() if k not in _CHOICE}
    return replace(record, settings=record.settings | {"rejection": rejection})


def differences(old: StageRecord, new: StageRecord) -> list[str]:
    """In words, one item for every setting and input: "`steps` was 40 and is 60"."""
    found = changes(without_layout(old.settings), new.settings)
    for name in dict.fromkeys([*old.inputs, *new.inputs]):
        if old.inputs.get(name) != new.inputs.get(name):
            stage = name.removeprefix("stage:")
            found.append(
                f"stage `{stage}` was done anew or is not done any more"
                if stage != name
                else f"{name} has changed"
            )
    return found
