"""Which settings make a run the run it is: what decides its numbers. A resumed run shares them.

The others may change: what is done with the run, and who computes what in which portions, which changes
numbers by rounding alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from grpo_dist.config import Config
from grpo_dist.config_files import dump_config

# Sections and keys that are not the run's.
_FREE = (
    "name", "output_dir", "steps", "evaluation", "rejection", "checkpoint", "tracking", "profile", "cluster",
)  # fmt: skip
# How the policy's state is shared out, and where it is.
_SHARDING = (
    "policy.num_workers", "policy.zero_stage", "policy.offload.optimizer", "policy.offload.parameters",
)  # fmt: skip
_LAYOUT = (
    *_SHARDING,
    "batch.micro_batch_tokens", "model.gradient_checkpointing",
    "policy.sequence_parallel", "policy.threads", "policy.logprob_chunk_mib", "policy.offload.nvme_path",
    "reference.num_workers", "reference.threads", "reference.micro_batch_tokens",
    "rewards.num_workers", "rewards.processes_per_worker",
    "rollout.num_workers", "rollout.tensor_parallel_size", "rollout.gpu_memory_utilization",
    "rollout.kv_cache_gib", "rollout.max_num_seqs", "rollout.threads", "rollout.enforce_eager",
    "weight_sync.backend", "weight_sync.bucket_mb",
)  # fmt: skip
_TOLD = 3  # differences a message names


@dataclass(frozen=True, slots=True)
class Change:
    """Of a dotted key."""

    key: str
    was: Any
    now: Any

    @property
    def is_layout(self) -> bool:
        """Whether the same is computed by others, or in other portions."""
        return self.key in _LAYOUT

    @property
    def is_sharding(self) -> bool:
        """Whether the policy's state is shared out otherwise."""
        return self.key in _SHARDING


def fingerprint(config: Config) -> str:
    """Hash of everything that decides the numbers of a run, so that a resumed run is the same run."""
    kept = config.model_dump(mode="json", exclude=set(_FREE))
    for key in _LAYOUT:
        *sections, name = key.split(".")
        own = kept
        for section in sections:
            own = own[section]
        del own[name]
    # Which steps are trained on decides the numbers; when to warn or stop does not.
    kept["health"] = {"min_signal_groups": config.health.min_signal_groups}
    if config.model.path != "sft":
        kept.pop("sft")  # nothing is made from it
    elif config.sft is not None:
        kept["sft"].pop("threads")
    if config.policy.optimizer.schedule != "constant":
        kept["steps"] = config.steps  # the schedule ends there
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def changes(was: str, config: Config) -> list[Change]:
    """From ``was``, a configuration as `dump_config` writes it. Raises yaml.YAMLError."""
    old, new = _flat(yaml.safe_load(was)), _flat(yaml.safe_load(dump_config(config)))
    keys = sorted(old.keys() | new.keys())
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def decisive(changes: Sequence[Change], config: Config) -> list[Change]:
    """Those that make ``config`` another run."""
    # A stage of a pipeline names others where its run had their directories: that is no difference.
    return [c for c in changes if _decides(c, config) and "stage:" not in str(c.now)]


def told(changes: Sequence[Change]) -> str:
    """The first of them, in words."""
    more = f" and {len(changes) - _TOLD} more" if len(changes) > _TOLD else ""
    return ", ".join(f"`{c.key}` = {c.now} was {c.was}" for c in changes[:_TOLD]) + more


def _decides(change: Change, config: Config) -> bool:
    """As `fingerprint` has it."""
    key = change.key
    if key == "steps":
        return config.policy.optimizer.schedule != "constant"
    if key.startswith("health."):
        return key == "health.min_signal_groups"
    return not change.is_layout and key.split(".")[0] not in _FREE


def _flat(tree: Any, path: str = "") -> Mapping[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``; lists stay whole."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {
        name: value
        for key, inner in tree.items()
        for name, value in _flat(inner, f"{path}.{key}" if path else str(key)).items()
    }
