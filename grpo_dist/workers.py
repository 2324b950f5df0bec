"""What the driver asks of its workers, in the words of RL. The Ray handles in `actors` and the fakes in tests
fit these.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_dist.health.bounds import Bound
from grpo_dist.runtime.metering import Usage
from grpo_dist.types import Group, Prompt, Rollout, Sampling, TrainBatch

# The sampled completions of one prompt, wherever they lie: an object reference between actors, the tuple
# itself in tests.
RolloutsRef = Any

# The updates of one step, dealt to ranks, wherever they lie. `Policy.stage` makes it in any thread.
StagedRef = Any


class Rollouts(Protocol):
    async def sample(self, prompt: Prompt, *, seeds: Sequence[int], sampling: Sampling) -> RolloutsRef: ...
    async def abandon(self) -> None: ...


class Rewards(Protocol):
    async def score(self, prompt: Prompt, rollouts: RolloutsRef) -> Group: ...


class Reference(Protocol):
    async def logprobs(self, prompt: Prompt, rollouts: RolloutsRef) -> list[np.ndarray]: ...
    async def save(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...


class ReferenceSync(Protocol):
    async def refresh(self) -> None: ...


class Policy(Protocol):
    def stage(self, batches: Sequence[TrainBatch]) -> StagedRef: ...
    async def update(
        self, staged: StagedRef, *, kl_coef: float, bounds: Sequence[Bound]
    ) -> dict[str, float]: ...
    async def trace_next(self, run_dir: Path, step: int) -> None: ...
    async def token_logprobs(self) -> dict[int, np.ndarray]: ...
    async def save(self, directory: Path, *, blocking: bool = True) -> None: ...
    async def saved(self) -> None: ...
    async def load(self, directory: Path) -> None: ...
    async def export(self, directory: Path, *, tokenizer_dir: Path) -> None: ...


class WeightSync(Protocol):
    async def push(self, version: int) -> dict[str, float]: ...


class WorkerUsage(Protocol):
    latest: dict[str, Usage]  # by worker, e.g. "rollout-0": what `read` found last

    async def read(self) -> dict[str, float]: ...
    def states(self) -> dict[str, bool]: ...


class Probes(Protocol):
    """See `actors.sync_probe.EngineProbe`."""

    def engines(self) -> dict[str, Any]: ...
    async def sample(
        self, engine: Any, prompts: Sequence[Prompt], seeds: Sequence[int], sampling: Sampling
    ) -> Sequence[tuple[Rollout, ...]]: ...
    async def logprobs(self, batch: TrainBatch) -> tuple[str, dict[int, np.ndarray]]: ...


@dataclass(frozen=True)
class Workers:
    """``reference`` is None exactly when the KL coefficient is 0, ``reference_sync`` when it stays frozen,
    ``usage`` when nobody counts what the workers do. ``where_stuck`` says where each worker is in its code,
    for a deadline that has passed. ``probe`` is None where there is no engine to probe: simulated workers.
    """

    rollouts: Rollouts
    rewards: Rewards
    reference: Reference | None
    policy: Policy
    sync: WeightSync
    reference_sync: ReferenceSync | None = None
    usage: WorkerUsage | None = None
    where_stuck: Callable[[], Awaitable[str]] | None = None
    probe: Probes | None = None
