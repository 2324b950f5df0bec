"""Simulated actors behind the real handles. They answer at once, so that a measurement sees only the driver,
Ray and the transfer of the records. This module imports neither torch nor an engine, so that 64 rollout
processes fit a small machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.workers.exchange import SamplingActor, ScoringActor
from grpo_dist.config import Config, RewardsConfig, RolloutConfig
from grpo_dist.runtime.load_balancer import Load
from grpo_dist.types import Group, Prompt, Rollout, Sampling
from tests.support.made_records import made_group, made_rollouts

if TYPE_CHECKING:
    from grpo_dist.workers import Workers

_MADE = 16  # distinct groups that a rollout worker cycles through


@dataclass(frozen=True)
class SimulatedSpec:
    """A replacement of `EngineSpec`."""

    rollout: RolloutConfig
    samples_per_prompt: int
    max_num_seqs: int = 256
    colocated: bool = False
    turns: int = 0  # turns per returned episode; 0: completions


class SimulatedRollout(SamplingActor):
    def __init__(self, spec: SimulatedSpec) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        samples, turns = spec.samples_per_prompt, spec.turns
        self._made = [made_rollouts("made", samples, rng, turns) for _ in range(_MADE)]

    async def start(self) -> None:
        """Return once the process is up."""

    async def sample(self, prompt: Prompt, seeds: Sequence[int], sampling: Sampling) -> tuple[Rollout, ...]:
        tokens = len(prompt.token_ids) + sampling.max_new_tokens
        self._count_finished(Load(len(seeds), len(seeds) * tokens))
        return self._made[seeds[0] % _MADE]

    async def close(self) -> None:
        """Release nothing."""


class SimulatedReward(ScoringActor):
    def __init__(self, settings: RewardsConfig, **others: Any) -> None:
        """Take the settings of the real worker."""
        super().__init__(threads=1)

    def ready(self) -> None:
        """Return once the process is up."""

    def score(
        self, prompt: Prompt, rollouts: Sequence[Rollout], modelled: Mapping[str, Any]
    ) -> tuple[Group, tuple[str, ...]]:
        return made_group(prompt, tuple(rollouts)), ()

    def close(self) -> None:
        """Release nothing."""


class SimulatedRank:
    def update(self, updates: Any, kl_coef: float | None, bounds: Sequence[Any]) -> dict[str, float]:
        return {"loss/policy": float(len(updates.batches))}

    def token_logprobs(self) -> dict[int, np.ndarray]:
        return {}


class NoSync:
    async def push(self, version: int) -> dict[str, float]:
        return {}


@contextmanager
def private_ray() -> Iterator[None]:
    import ray  # light, as above

    from actors.connection import start_private_ray

    start_private_ray(include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def ray_workers(config: Config, prompts: list[Prompt], turns: int = 0) -> AsyncIterator[Workers]:
    """Yield the real handles, with simulated actors in the numbers of workers in ``config``."""
    # Light: each simulated rollout process imports this module.
    from actors.lifecycle.team import ActorSpec
    from actors.workers.policy import PolicyGroup, PolicySpec
    from actors.workers.reward import RewardPool
    from actors.workers.rollout import RolloutPool
    from grpo_dist.workers import Workers

    actors = ActorSpec({"num_cpus": 0})
    spec: Any = SimulatedSpec(config.rollout, config.batch.samples_per_prompt, turns=turns)
    rollouts = RolloutPool(spec, actors, worker=SimulatedRollout)
    rewards = RewardPool(
        config.rewards, actors, max_new_tokens=config.sampling.max_new_tokens, worker=SimulatedReward
    )
    rank: Any = SimulatedRank
    policy = PolicyGroup(
        PolicySpec.from_config(config, Path()), actors, timeouts=config.cluster.timeouts, worker=rank
    )
    try:
        await rollouts.ready()
        await rewards.ready()
        no_sync: Any = NoSync()
        yield Workers(rollouts, rewards, None, policy, no_sync)
    finally:
        for handle in (rollouts, rewards, policy):
            await handle.shutdown()
