"""Two real engines, a real policy rank, and their weight sync, each kind with classes of its own."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.weight_sync import WeightSync
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.config import ModelConfig, RestartsConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.types import Sampling
from tests.support.patience import HANG_S
from tests.support.real_engine import ACTORS, PROMPTS, MovingWorker, OnALoop, one_rank


class TwoEngines(OnALoop):
    """Start them. ``model`` is a trainer on this process that `follow` gives the policy's weights.

    Args:
        engine, rank: classes of the workers.
        tensor_parallel: processes of one engine, in place of two engines of one process each.
    """

    def __init__(
        self,
        model_dir,
        settings: WeightSyncConfig,
        seeds: list[int],
        sampling: Sampling,
        *,
        engine: type,
        rank: type = MovingWorker,
        tensor_parallel: int = 1,
    ) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.seeds, self.sampling = seeds, sampling
        self.run(self._start(model_dir, settings, engine, rank, tensor_parallel))

    async def _start(self, model_dir, settings, engine, rank, tensor_parallel) -> None:
        model = ModelConfig(path="tiny")
        rollout = RolloutConfig(
            num_workers=2 // tensor_parallel,
            tensor_parallel_size=tensor_parallel,
            max_num_seqs=16,
            enforce_eager=True,
            kv_cache_gib=0.25,
        )
        spec = EngineSpec(rollout, settings, model, str(model_dir), max_length=256, seed=0)
        actors = replace(ACTORS, restarts=RestartsConfig(backoff_s=0.1), start_s=HANG_S)
        self.rollouts = RolloutPool(spec, actors, worker=engine)
        self.policy = one_rank(model, model_dir, worker=rank)
        await asyncio.gather(self.rollouts.ready(), self.policy.ready())
        self.sync = await WeightSync.connect(self.policy, self.rollouts, settings, timeout_s=HANG_S)

    def follow(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()

    async def sample_on(self, worker):
        """Return the samples of the first prompt from this engine."""
        _, rollouts = worker.sample.options(num_returns=2).remote(PROMPTS[0], self.seeds, self.sampling)
        return await rollouts

    async def sample_on_both(self):
        """Wait until both engines serve; return the samples of each."""
        while len(self.rollouts.team.alive()) < 2:
            await asyncio.sleep(0.1)
        return await asyncio.gather(*(self.sample_on(worker) for worker in self.rollouts.workers))


def world_of(make: Callable[[Any], OnALoop]):
    """Return a fixture of the test file: what ``make`` starts with the tiny model."""

    @pytest.fixture(scope="module")
    def world(ray_cluster, tiny_model):
        world = make(tiny_model)
        yield world
        world.close()

    return world


def on_the_loop(test: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """Run an asynchronous test on the loop of its `world`."""

    @functools.wraps(test)
    def run(world) -> None:
        world.run(test(world))

    return run
