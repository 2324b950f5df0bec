"""The workers as the driver sees them, in RL terms. The Ray handles in `actors` and the fakes in tests
implement these protocols.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_dist.health import Bound
from grpo_dist.runtime.metering import Usage
from grpo_dist.types import EpochUpdate, Group, Prompt, Rollout, Sampling, TeacherLogprobs, TrainBatch

# A reference to the sampled completions of one prompt; in tests, the tuple itself.
RolloutsRef = Any

# The updates of one step, sharded over ranks. `PolicyHandle.stage` makes it, in any thread.
StagedRef = Any


class RolloutHandle(Protocol):
    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef: ...
    async def abandon(self) -> None: ...


class RewardHandle(Protocol):
    async def score(self, prompt: Prompt, rollouts: RolloutsRef) -> Group: ...


class ReferenceHandle(Protocol):
    async def logprobs(
        self, prompt: Prompt, rollouts: RolloutsRef, top_k: int = 0
    ) -> list[TeacherLogprobs]: ...
    async def save(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...


class ReferenceSyncHandle(Protocol):
    async def refresh(self) -> None: ...


class PolicyHandle(Protocol):
    def stage(
        self,
        batches: Sequence[TrainBatch],
        *,
        keep_logprobs: bool,
        later_epochs: Sequence[Sequence[EpochUpdate]] = ...,
    ) -> StagedRef: ...
    async def update(
        self, staged: StagedRef, *, kl_coef: float, bounds: Sequence[Bound]
    ) -> dict[str, float]: ...
    async def trace_next(self, run_dir: Path, step: int) -> None: ...
    async def token_logprobs(self) -> dict[int, np.ndarray]: ...
    async def score_norms(self, batch: TrainBatch) -> dict[int, np.ndarray]: ...
    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]: ...
    async def check_sees(self, path: Path) -> None: ...
    async def save(self, directory: Path, *, blocking: bool = True) -> None: ...
    async def saved(self) -> None: ...
    async def load(self, directory: Path) -> None: ...
    async def export(self, directory: Path, *, tokenizer_dir: Path) -> None: ...


class WeightSyncHandle(Protocol):
    async def push(self, version: int) -> dict[str, float]: ...


class WorkerUsage(Protocol):
    latest: dict[str, Usage]  # by worker, e.g. "rollout-0": the result of the last `read`

    async def read(self) -> dict[str, float]: ...
    def states(self) -> dict[str, bool]: ...


class ProbeHandle(Protocol):
    """See `actors.weight_sync.EngineProbe`."""

    def engines(self) -> dict[str, Any]: ...
    async def sample(
        self, engine: Any, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Sequence[tuple[Rollout, ...]]: ...
    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]: ...


class EvaluationHandle(Protocol):
    """Engines for evaluation only; see `actors.evaluation_engines.EvaluationEngines`."""

    @property
    def rollouts(self) -> RolloutHandle: ...
    @property
    def rewards(self) -> RewardHandle: ...
    async def snapshot(self, directory: Path, version: int) -> None: ...
    async def written(self) -> None: ...
    async def load(self, directory: Path) -> bool: ...
    def has_snapshot(self, directory: Path) -> bool: ...
    async def discard(self, directory: Path) -> None: ...


class NoSampling:
    """Replaces engines, reward workers and weight sync in supervised training, which needs none of them."""

    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef:
        raise AssertionError("supervised training samples nothing")

    async def score(self, prompt: Prompt, rollouts: RolloutsRef) -> Group:
        raise AssertionError("supervised training scores nothing")

    async def abandon(self) -> None:
        """Nothing is in flight."""

    async def push(self, version: int) -> dict[str, float]:
        """Return no metrics: no engine waits for weights."""
        return {}


NO_SAMPLING = NoSampling()


@dataclass(frozen=True)
class Workers:
    """Handles to all workers of a run.

    Attributes:
        reference: None where neither a KL term nor a teacher needs it.
        reference_sync: None when the reference stays frozen.
        usage: None when the work of the workers is not measured.
        where_stuck: describes where each worker is in its code, for the error of a missed deadline.
        probe: None without engines to probe, as with simulated workers.
        evaluation: None where evaluation uses the engines of training.
        teachers: teachers with their own model, by name.
        leaving_nodes: nodes of the driver and of policy ranks that are being drained; callable at any time.
    """

    rollouts: RolloutHandle
    rewards: RewardHandle
    reference: ReferenceHandle | None
    policy: PolicyHandle
    sync: WeightSyncHandle
    reference_sync: ReferenceSyncHandle | None = None
    usage: WorkerUsage | None = None
    where_stuck: Callable[[], Awaitable[str]] | None = None
    probe: ProbeHandle | None = None
    evaluation: EvaluationHandle | None = None
    teachers: Mapping[str, ReferenceHandle] = field(default_factory=dict)
    leaving_nodes: Callable[[], frozenset[str]] = frozenset
