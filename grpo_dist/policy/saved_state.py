"""The sharded state of DeepSpeed's engine, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_dist.config import PolicyConfig
from grpo_dist.policy.deepspeed_engine import use_policy_files
from grpo_dist.policy.offload import create_moments, optimizer_device, set_steps
from grpo_dist.policy.resharding import SavedPolicy, Sharding, reshard

_TAG = "state"  # of DeepSpeed's checkpoint: one per directory, whose name has the step


class SavedState:
    """What is trained, its optimiser and its counters. All ranks call the same methods in the same order."""

    def __init__(self, engine: Any, policy: PolicyConfig, num_ranks: int) -> None:
        self._engine, self._policy, self._num_ranks = engine, policy, num_ranks
        self.files = use_policy_files(engine)

    def save(self, directory: Path, counters: Mapping[str, Any], *, blocking: bool = True) -> None:
        """Write this rank's share, with ``counters``. Collective.

        ``blocking`` False: return once the state is copied in host memory; `is_saved` returns whether the
        files are written.
        """
        self.files.blocking = blocking
        frozen = self._policy.lora is not None  # all but the adapters, and that is in the model's directory
        self._engine.save_checkpoint(
            str(directory), tag=_TAG, client_state=dict(counters), exclude_frozen_parameters=frozen
        )

    def is_saved(self) -> bool:
        """Return whether every file is written. Raises the error of a write that failed. Any thread may call
        it.
        """
        return bool(self.files.written())

    def load(self, directory: Path) -> Mapping[str, Any]:
        """Load what `save` wrote, also by other ranks or under another ZeRO stage; return its counters.
        Collective.

        Raises:
            ValueError: there is no policy state, or none that can be read.
        """
        if not (directory / _TAG).is_dir():
            raise ValueError(f"{directory}: no policy state; use another checkpoint")
        own = Sharding.of(self._num_ranks, self._engine.config)
        saved = SavedPolicy(directory / _TAG, self.files.mapped)
        if saved.sharding == own:
            return self._load_unchanged(directory)
        reshard(saved, self._engine, own)
        return saved.client_state

    def _load_unchanged(self, directory: Path) -> Mapping[str, Any]:
        """Let DeepSpeed load its own files, bit by bit: as many ranks wrote them at the same ZeRO stage."""
        on_disk = optimizer_device(self._policy) == "nvme"
        if on_disk:
            create_moments(self._engine.optimizer)
        whole = self._policy.lora is None
        path, counters = self._engine.load_checkpoint(str(directory), tag=_TAG, load_module_strict=whole)
        if path is None:
            raise ValueError(f"{directory}: DeepSpeed finds no policy state there; use another checkpoint")
        if on_disk:
            set_steps(self._engine.optimizer, counters["updates"])
        found: Mapping[str, Any] = counters
        return found
