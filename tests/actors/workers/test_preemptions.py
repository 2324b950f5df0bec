"""A real engine whose cache is too small for its sequences: vLLM preempts some of them."""

import asyncio

import pytest

from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutPool, RolloutWorker
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.types import Sampling
from tests.support.real_engine import ACTORS, PROMPTS, same


class LosingWorker(RolloutWorker):
    """An engine that counts the tokens that it has to compute again."""

    _lost = 0

    async def start(self, *arguments):
        await super().start(*arguments)
        scheduler = self._engine._core.scheduler
        preempt = scheduler._preempt_request

        def counted(request, *details, **named):
            self._lost += request.num_tokens
            preempt(request, *details, **named)

        scheduler._preempt_request = counted

    async def lost(self):
        return self._lost


def sampled(model_dir, **engine):
    """Return samples of all prompts with a cache for eight whole ones, and the preempted tokens."""
    settings = RolloutConfig(max_num_seqs=32, enforce_eager=True, kv_cache_gib=0.004, engine=engine)
    spec = EngineSpec(settings, WeightSyncConfig(), ModelConfig(path="tiny"), str(model_dir), 256, seed=0)
    seeds = list(range(16))
    sampling = Sampling(max_new_tokens=220, lengths=[60 + 10 * seed for seed in seeds])

    async def run():
        pool = RolloutPool(spec, ACTORS, worker=LosingWorker)
        await pool.ready()
        try:
            stored = await asyncio.gather(*(pool.sample(p, seeds=seeds, sampling=sampling) for p in PROMPTS))
            return [await group for group in stored], await pool.workers[0].lost.remote()
        finally:
            await pool.shutdown()

    return asyncio.run(run())


@pytest.mark.machine
@pytest.mark.slow
def test_cache_kept_free_for_growth_changes_no_sample_and_fewer_tokens_are_lost(ray_cluster, tiny_model):
    plain, lost = sampled(tiny_model, watermark=0.0)
    reserved, less = sampled(tiny_model)
    assert all(same(a, b) for a, b in zip(plain, reserved, strict=True))
    assert 0 < less < lost
