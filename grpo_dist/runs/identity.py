"""The identity of a run: the settings and the user's code that determine its numbers. A resumed run must keep
them.

A resume may change what is done with the run, the layout of its workers, which changes numbers by rounding
only, and a few settings whose change is recorded: they are part of the identity from then on.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fnmatch import fnmatchcase
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any
from uuid import UUID

import numpy as np
import yaml

from grpo_dist.chat.template import writes_date
from grpo_dist.config import Config, DataConfig, RewardsConfig, RolloutConfig
from grpo_dist.config.differences import drop, flat, has_place
from grpo_dist.config.files import dump_config
from grpo_dist.config.text import unescaped
from grpo_dist.data.columns import Prompts, column, digest_parts
from grpo_dist.environments.registry import agent_scripts, user_environments
from grpo_dist.plugins.user_code import METRIC, SINK, UserComponent, code_digest
from grpo_dist.rewards.registry import user_rewards
from grpo_dist.types import Prompt

# Sections and keys that may change.
_FREE = (
    "name", "output_dir", "steps", "evaluation", "rejection", "checkpoint", "tracking", "profile", "cluster",
    "bench",
    "code_paths",  # the files' contents are compared (`CheckpointState.code`), not their paths
)  # fmt: skip
_FREE_KEYS = (
    "data.eval", "data.overlap", "algorithm.preset", "weight_sync.probe_every", "weight_sync.probe_above",
    "data.template_date",  # its effect is in the prompts' tokens, which are compared
    "rewards.trial", "rewards.by_source.*.trial",
)  # fmt: skip
# Paths that may change: what they lead to is compared (`CheckpointState.data` and `columns`). "*" would match
# further parts, such as `kwargs.path`.
_COMPARED = re.compile(r"(data\.train|demonstrations\.data)\.\d+\.path")
# Keys that may change on resume although they determine numbers: an event records each change.
_RECORDED = (
    "policy.optimizer.lr", "algorithm.kl.coef", "algorithm.*clip_low", "algorithm.*clip_high",
    "data.train.*.algorithm.kl.coef", "data.train.*.algorithm.loss.clip_low",
    "data.train.*.algorithm.loss.clip_high",
    "sampling.max_new_tokens", "data.max_prompt_tokens", "health.min_signal_groups",
)  # fmt: skip
# Why a resumed run must keep other keys, by key prefix.
_REASONS = {
    "model": "the checkpoint has the weights of that model",
    "policy.lora": "the checkpoint has adapters of that shape",
    "batch": "the checkpoint counts prompts and updates in such batches",
    "data": "the checkpoint has a position in the order of those prompts",
    "seed": "samples and orders of the steps so far follow from it",
    "steps": "the learning rate decays to that step",
}
# How the policy's state is sharded, and where it is stored.
_SHARDING = (
    "policy.num_workers", "policy.zero_stage", "policy.offload.optimizer", "policy.offload.parameters",
)  # fmt: skip
_LAYOUT = (
    *_SHARDING,
    "batch.micro_batch_tokens", "model.gradient_checkpointing",
    "policy.sequence_parallel", "policy.threads", "policy.offload.nvme_path",
    "reference.num_workers", "reference.micro_batch_tokens",
    "rewards.num_workers", "rewards.processes_per_worker", "environments.num_workers",
    "distillation.teachers.*.num_workers",
    "rewards.models.*.num_workers", "rewards.models.*.micro_batch_tokens",
    "rewards.models.*.gpu_share", "rewards.models.*.tensor_parallel_size",
    "rollout.num_workers", "rollout.max_workers", "rollout.tensor_parallel_size",
    "rollout.gpu_memory_utilization",
    "rollout.kv_cache_gib", "rollout.max_num_seqs", "rollout.threads", "rollout.enforce_eager",
    "weight_sync.backend", "weight_sync.bucket_mb", "weight_sync.deltas",
)  # fmt: skip
# Keys of `sft` that may change, and the sections that supervised training on the policy's ranks reads.
FREE_SFT = ("validate_every",)
_SUPERVISED = {"seed", "steps", "model", "policy", "sft"}
_DESCRIBED = 3  # differences that a message names
_UIDS = 4096  # hashed at once
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json",
    "added_tokens.json", "tekken.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """A changed value of a dotted key."""

    key: str
    was: Any
    now: Any

    @property
    def is_layout(self) -> bool:
        """Return whether it only changes which workers compute, or in which portions."""
        return any(fnmatchcase(self.key, pattern) for pattern in _LAYOUT)

    @property
    def is_sharding(self) -> bool:
        """Return whether it changes how the policy's state is sharded."""
        return self.key in _SHARDING

    @property
    def is_recorded(self) -> bool:
        """Return whether a resumed run may make it although it changes numbers."""
        if self.key == "algorithm.kl.coef" and not (self.was and self.now):
            return False  # the run would gain or lose the reference
        return any(fnmatchcase(f"{self.key}.", f"{pattern}.*") for pattern in _RECORDED)

    @property
    def is_of_source_rewards(self) -> bool:
        """Return whether it changes the rewards of a single source, which may be a held-out set."""
        return self.key.startswith("rewards.by_source.") and ".trial." not in f"{self.key}."

    @property
    def reason(self) -> str:
        """Return why a resumed run cannot make it."""
        two_algorithms = "the steps before and after it would be of two algorithms"
        if fnmatchcase(f"{self.key}.", "data.train.*.algorithm.*"):
            return two_algorithms
        reasons = (why for begin, why in _REASONS.items() if f"{self.key}.".startswith(f"{begin}."))
        return next(reasons, two_algorithms)

    def decides(self, config: Config) -> bool:
        """Return whether it turns ``config`` into another run."""
        return _decides(self.key, config)


def _decides(key: str, config: Config) -> bool:
    """Return whether the setting ``key`` determines the numbers of ``config``. In `health`, only the choice
    of trained steps does, not when to warn or stop.
    """
    section, name = key.partition(".")[::2]
    if config.is_supervised and section not in _SUPERVISED:
        return False
    if section == "steps":
        return _depends_on_steps(config)
    if section == "health":
        return key == "health.min_signal_groups"
    if section == "sft":
        return config.model.path == "sft" and name not in FREE_SFT
    if section == "rewards" and name.startswith("by_source") and not _is_of_training(name, config.data):
        return False
    is_free = any(fnmatchcase(f"{key}.", f"{pattern}.*") for pattern in _FREE_KEYS)
    is_free = is_free or section in _FREE or _COMPARED.fullmatch(key) is not None
    return not is_free and not Change(key, None, None).is_layout


def _is_of_training(name: str, data: DataConfig) -> bool:
    """Return whether ``name``, a key of `rewards`, belongs to a training source in `rewards.by_source`."""
    return any(f"{name}.".startswith(f"by_source.{source.label}.") for source in data.train)


def _depends_on_steps(config: Config) -> bool:
    """Return whether the learning rate of a step depends on the number of all steps."""
    optimizer = config.policy.optimizer
    return optimizer.schedule != "constant" or optimizer.warmup_share > 0


def fingerprint(config: Config) -> str:
    """Hash everything that determines the numbers of a run: a resumed run must have the same hash."""
    settings = flat(config.model_dump(mode="json"))
    decisive = {key: value for key, value in settings.items() if _decides(key, config)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def data_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the training data, in order: uids (of problem and answer, or of a demonstration), and
    the token ids that the policy and its teachers read.
    """
    joined = Prompts.join([prompts])

    def parts() -> Iterator[bytes]:
        columns = (column(joined.distinct, name) for name in ("token_ids", "teacher_ids"))
        for ids, teacher_ids in zip(*columns, strict=True):
            teacher_parts = [name.encode() + each.tobytes() for name, each in sorted(teacher_ids.items())]
            yield b"".join([ids.tobytes(), *teacher_parts]) if teacher_parts else ids.tobytes()

    return joined.digest("tokens", parts, with_uids=True)


@dataclass(frozen=True, slots=True)
class DataOrigin:
    """The origin of training prompts.

    Attributes:
        rows: hash of the rows' contents, in order, independent of the tokenizer.
        reading: everything else that determines their tokens, by its name in messages.
    """

    rows: str = ""
    reading: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_rows(
        cls, row_uids: Iterable[str], tokenizer: Any, model_dir: Path, data: DataConfig
    ) -> DataOrigin:
        """Return the origin of prompts, or demonstrations, made of the rows ``row_uids``."""
        reading = {f"version of {name}": version(name) for name in ("transformers", "tokenizers")}
        reading["content of the model's tokenizer files"] = _files_digest(model_dir)
        if writes_date(tokenizer) and data.template_date is not None:
            reading["date that the chat template writes (`data.template_date`)"] = data.template_date
        uids = iter(row_uids)
        parts = iter(lambda: "\n".join(islice(uids, _UIDS)).encode(), b"")
        rest = (b"\n" + part for part in parts)
        return cls(digest_parts(chain([next(parts, b"")], rest)), reading)

    def changes(self, reading: Mapping[str, str]) -> list[str]:
        """Describe the changes since ``reading``."""
        names = sorted({*self.reading, *reading})
        return [
            f"the {name} was {reading.get(name, 'unknown')} and is {self.reading.get(name, 'none')}"
            for name in names
            if self.reading.get(name) != reading.get(name)
        ]


def _files_digest(model_dir: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in model_dir.glob(pattern)}):
        if file.is_file():
            digest.update(file.name.encode() + b"\n" + file.read_bytes())
    return digest.hexdigest()[:16]


def columns_digest(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the columns of the training data, in order: rewards, environments and pools read
    them. Equal contents have equal hashes in every process.
    """
    joined = Prompts.join([prompts])
    return joined.digest(
        "columns", lambda: map(_column_bytes, column(joined.distinct, "columns")), with_uids=False
    )


def _column_bytes(columns: Mapping[str, Any]) -> bytes:
    if not columns:
        return b"{}\n"
    try:
        text = json.dumps(_comparable(columns), sort_keys=True)
    except RecursionError:  # a column that contains itself
        text = repr(sorted(columns))
    return text.encode() + b"\n"


def _comparable(value: Any) -> Any:
    """Return ``value`` as JSON that depends on its contents alone, with sets in order.

    An object of any other class counts as its class: its text may contain an address.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        return hex(value)  # decimal digits are limited
    if isinstance(value, Enum | PurePath | UUID | complex | bytes | date | time | timedelta | Decimal):
        return repr(value)
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {repr(_comparable(key)): _comparable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_comparable(inner)) for inner in value)
    if isinstance(value, np.ndarray | np.generic):
        return _comparable(value.tolist())
    return f"{type(value).__module__}.{type(value).__qualname__}"


def drop_layout(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``settings``, sections of a configuration, without the keys of the layout."""
    remaining = dict(settings)
    for key in _LAYOUT:
        remaining = drop(remaining, key.split("."))
    return remaining


def changes(was: str, config: Config) -> list[Change]:
    """Return the changes from ``was``, as `dump_config` wrote it, to ``config``. Raises yaml.YAMLError.

    A key that a later version added is no change if it has its default.
    """
    written = (was, dump_config(config))
    before, after = (unescaped(yaml.safe_load(text)) for text in written)
    old, new = flat(before), flat(after)
    set_now = flat(config.model_dump(mode="json", exclude_defaults=True))
    keys = sorted(old.keys() | {key for key in new if key in set_now or has_place(key, old)})
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def describe(changes: Sequence[Change]) -> str:
    """Describe the first few ``changes`` for a message."""
    more = f" and {len(changes) - _DESCRIBED} more" if len(changes) > _DESCRIBED else ""
    return ", ".join(f"`{c.key}` = {c.now} was {c.was}" for c in changes[:_DESCRIBED]) + more


def digest_run_code(config: Config) -> dict[str, str]:
    """Return `code_digest` of all components that determine the numbers of a run: not of metrics, sinks and
    held-out sets.
    """
    trained = config.data.model_copy(update={"eval": ()})
    components = config.model_copy(update={"data": trained}).user_components
    labels = {source.label for source in trained.train}
    by_source = {name: rewards for name, rewards in config.rewards.by_source.items() if name in labels}
    rewards = config.rewards.model_copy(update={"by_source": by_source})
    return _digest([c for c in components if c.kind not in (METRIC, SINK)], rewards, trained)


def digest_sampling_code(rollout: RolloutConfig, rewards: RewardsConfig, data: DataConfig) -> dict[str, str]:
    """Return `code_digest` of the components that determine samples of a model and their rewards."""
    return _digest(rollout.user_components, rewards, data)


def _digest(components: Sequence[UserComponent], rewards: RewardsConfig, data: DataConfig) -> dict[str, str]:
    user_code = [*components, *user_rewards(rewards), *user_environments(data)]
    return code_digest(user_code, rewards.code_paths, agent_scripts(data, rewards.code_paths))
