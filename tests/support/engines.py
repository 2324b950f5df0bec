"""Real engines: two with a rank, one with drafts, one beside a trainer; and vLLM's layers alone."""

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)

from actors.evaluation_engines import EvaluationEngines
from actors.weight_sync import WeightSync
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutPool, RolloutWorker
from grpo_dist.config import (
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RestartsConfig,
    RolloutConfig,
    SpeculationConfig,
    WeightSyncConfig,
)
from grpo_dist.config import WeightSyncConfig as SyncConfig
from grpo_dist.types import Sampling
from tests.support import made_groups
from tests.support.patience import HANG_S
from tests.support.real_engine import (
    ACTORS,
    PROMPTS,
    CountingWorker,
    MovingWorker,
    OnALoop,
    World,
    difference,
    one_rank,
)
from tests.support.real_ranks import UpdatedWorker

# Two real engines, a real policy rank, and their weight sync.


class TwoEngines(OnALoop):
    """Starts them. ``model`` is a trainer in this process that `follow` gives the policy's weights.

    Args:
        engine, rank: classes of the workers.
        tensor_parallel: processes of one engine; 1: two engines of one process each.
    """

    def __init__(
        self, model_dir, settings: WeightSyncConfig, seeds: list[int], sampling: Sampling, *, engine: type,
        rank: type = MovingWorker, tensor_parallel: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.seeds, self.sampling = seeds, sampling
        self.run(self._start(model_dir, settings, engine, rank, tensor_parallel))

    async def _start(self, model_dir, settings, engine, rank, tensor_parallel) -> None:
        model = ModelConfig(path="tiny")
        rollout = RolloutConfig(
            num_workers=2 // tensor_parallel, tensor_parallel_size=tensor_parallel, max_num_seqs=16,
            enforce_eager=True, kv_cache_gib=0.25,
        )  # fmt: skip
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
        return await worker.sample.remote(PROMPTS[0], self.seeds, self.sampling)

    async def sample_on_both(self):
        """Wait until both engines serve; return the samples of each."""
        while len(self.rollouts.team.alive()) < 2:
            await asyncio.sleep(0.1)
        return await asyncio.gather(*(self.sample_on(worker) for worker in self.rollouts.workers))


def world_of(make: Callable[[Any], OnALoop]):
    """Return a fixture for the test file: the result of ``make`` for the tiny model."""

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


# A real engine with or without drafts that samples the prompts of `real_engine`.

WAYS = {  # sampling settings
    "plain": {}, "cold": {"temperature": 0.3}, "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"top_k": 5}, "greedy": {"temperature": 0.0},
}  # fmt: skip


def warm_up_with_drafts(worker):
    """Count drafts, as vLLM's warm-up of a sampler does on a GPU."""
    sampler = getattr(worker.model_runner, "rejection_sampler", None)
    if sampler is not None:
        sampler._counts = sampler._counts.plus((16, 16, 1))


class DraftingWorker(CountingWorker):
    """An engine that reports its draft counts."""

    async def _warm_up(self):
        await super()._warm_up()
        await self._engine.in_workers(warm_up_with_drafts)

    async def counts(self):
        from actors.workers.drafter import take_counts

        return tuple((await self._engine.in_workers(take_counts))[0])


class Engine(OnALoop):
    """One engine that samples all prompts at once."""

    def __init__(self, model_dir, **speculation):
        super().__init__()
        settings = RolloutConfig(
            max_num_seqs=16,
            enforce_eager=True,
            speculation=SpeculationConfig(**speculation) if speculation else None,
        )
        spec = EngineSpec(settings, WeightSyncConfig(), ModelConfig(path="tiny"), str(model_dir), 256, seed=0)
        self.rollouts = RolloutPool(spec, ACTORS, worker=DraftingWorker)
        self.run(self.rollouts.ready())

    def sample(self, seeds, **sampling):
        async def together():
            requests = [
                await self.rollouts.sample(
                    p, seeds=list(seeds), sampling=Sampling(max_new_tokens=48, **sampling)
                )
                for p in PROMPTS
            ]
            return await asyncio.gather(*requests)

        return self.run(together())

    def counts(self):
        return ray.get(self.rollouts.workers[0].counts.remote())

    def close(self):
        self.run(self.rollouts.shutdown())
        self.loop.close()


def sampled_without_drafts(model_dir, *seeds):
    """Return the samples of an engine without drafts, by key of `WAYS` and each of ``seeds``."""
    engine = Engine(model_dir)
    samples = {
        (way, group_seeds): engine.sample(group_seeds, **settings)
        for way, settings in WAYS.items()
        for group_seeds in seeds
    }
    engine.close()
    return samples


# Evaluation engines, and a real policy rank whose snapshots they load.

SEEDS, SAMPLING = [1, 2, 3], Sampling(max_new_tokens=48)


class KillableWorker(RolloutWorker):
    """An engine that reports its process id."""

    async def process(self):
        return os.getpid()


class EvaluatedWorld(OnALoop):
    def __init__(self, model_dir, settings=PolicyConfig(zero_stage=2)):  # noqa: B008
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.run(self._start(model_dir, settings))

    async def _start(self, model_dir, settings):
        model = ModelConfig(path="tiny")
        rollout = RolloutConfig(max_num_seqs=16, enforce_eager=True, kv_cache_gib=0.25)
        spec = EngineSpec(rollout, SyncConfig(), model, str(model_dir), max_length=256, seed=0)
        actors = replace(ACTORS, restarts=RestartsConfig(backoff_s=0.1), start_s=HANG_S)
        self.rollouts = RolloutPool(spec, actors, worker=KillableWorker, role="evaluation")
        self.policy = one_rank(model, model_dir, settings)
        await asyncio.gather(self.rollouts.ready(), self.policy.ready())
        self.engines = EvaluationEngines(self.policy, self.rollouts, None, timeout_s=HANG_S)

    async def sample_all(self):
        return await self.groups_of(PROMPTS, SEEDS, SAMPLING)

    def move(self, seed):
        return ray.get(self.policy.ranks[0].move.remote(seed))

    def difference(self, sampled, weights):
        self.model.load_state_dict(weights, strict=False)
        return max(difference(self.model, p, rollouts) for p, rollouts in zip(PROMPTS, sampled, strict=True))

    async def load(self, directory, version):
        await self.engines.snapshot(directory, version)
        await self.engines.written()
        assert await self.engines.load(directory)


# Differences between a real engine and the rank that feeds it, before and after updates.

LIMIT = 1e-5  # nats, engine and trainer in float32


EAGER = {"enforce_eager": True}  # an engine that compiles nothing starts sooner


def largest(model, sampled):
    return max(difference(model, *pair) for pair in zip(PROMPTS, sampled, strict=True))


def differences(model_dir, settings, engine=EAGER):
    """Return the largest |engine - trainer|, nats: from the checkpoint and after each of two updates with
    sync; and, after each update, for the samples from before it.
    """
    world = World(model_dir, settings, UpdatedWorker, **engine)
    try:
        how = {"dtype": torch.float32, "attn_implementation": "eager"}  # caps attention's logits, too
        model = AutoModelForCausalLM.from_pretrained(model_dir, **how)
        sampled = world.sample_all()
        synced, stale = [largest(model, sampled)], []
        for seed in (1, 2):
            batch = made_groups.batch(seed=seed, reference=False)
            model.load_state_dict(ray.get(world.policy.ranks[0].updated.remote(batch)), strict=False)
            model.tie_weights()
            world.push()
            stale.append(largest(model, sampled))
            sampled = world.sample_all()
            synced.append(largest(model, sampled))
        return synced, stale
    finally:
        world.close()


def trained(**settings):
    return PolicyConfig(zero_stage=2, optimizer=OptimizerConfig(lr=3e-3, schedule="constant"), **settings)


# vLLM's layers in this process, without an engine.


@contextmanager
def one_process_of(dtype: torch.dtype, directory: Path) -> Iterator[None]:
    """Make this process the only rank of a model in ``dtype``; its group meets in ``directory``."""
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.model_config = SimpleNamespace(dtype=dtype, is_moe=False)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
    cleanup_dist_env_and_memory()
