"""A real engine that drafts, or does not, and samples the prompts of `real_engine`."""

import asyncio

import ray

from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.config import ModelConfig, RolloutConfig, SpeculationConfig, WeightSyncConfig
from grpo_dist.types import Sampling
from tests.support.real_engine import ACTORS, PROMPTS, CountingWorker, OnALoop

# Ways to sample.
WAYS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"top_k": 5},
    "greedy": {"temperature": 0.0},
}


def warm_up_with_drafts(worker):
    """Count drafts, as vLLM's own warm-up of a sampler does on a GPU."""
    sampler = getattr(worker.model_runner, "rejection_sampler", None)
    if sampler is not None:
        sampler._counts = sampler._counts.plus((16, 16, 1))


class DraftingWorker(CountingWorker):
    """An engine that reports what was drafted."""

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
            max_num_seqs=16, enforce_eager=True, speculation=SpeculationConfig(**speculation)
        )
        spec = EngineSpec(settings, WeightSyncConfig(), ModelConfig(path="tiny"), str(model_dir), 256, seed=0)
        self.rollouts = RolloutPool(spec, ACTORS, worker=DraftingWorker)
        self.run(self.rollouts.ready())

    def sample(self, seeds, **sampling):
        async def together():
            asked = [
                await self.rollouts.sample(
                    p, seeds=list(seeds), sampling=Sampling(max_new_tokens=48, **sampling)
                )
                for p in PROMPTS
            ]
            return await asyncio.gather(*asked)

        return self.run(together())

    def counts(self):
        return ray.get(self.rollouts.workers[0].counts.remote())

    def close(self):
        self.run(self.rollouts.shutdown())
        self.loop.close()


def sampled_without_drafts(model_dir, *seeds):
    """Return the samples of an engine without drafts, by way of `WAYS` and each of ``seeds``."""
    engine = Engine(model_dir)
    found = {(way, own): engine.sample(own, **settings) for way, settings in WAYS.items() for own in seeds}
    engine.close()
    return found
