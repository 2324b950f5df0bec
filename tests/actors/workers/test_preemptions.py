"""Cache that sequences give up: what is counted, by hand and in a real engine whose cache is too small."""

import asyncio
from types import SimpleNamespace

import pytest
import ray

from actors.workers.engine_settings import EngineSpec
from actors.workers.engine_thread import Preemptions
from actors.workers.rollout import RolloutWorker
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.types import Sampling
from tests.support.real_engine import ACTORS, PROMPTS, OnALoop, same


def request(name, preemptions, tokens=10):
    return SimpleNamespace(request_id=name, num_preemptions=preemptions, num_tokens=tokens)


def test_each_preemption_counts_once():
    scheduler = SimpleNamespace(waiting=[request("new", 0)])
    preemptions = Preemptions(scheduler)
    assert preemptions.since() == 0
    scheduler.waiting = [request("a", 1, 30), request("b", 1, 12), request("new", 0)]
    assert preemptions.since() == 42
    assert preemptions.since() == 0  # the same two still wait
    scheduler.waiting = [request("c", 1, 5), *scheduler.waiting]
    assert preemptions.since() == 5
    scheduler.waiting = [request("a", 2, 31), request("new", 0)]  # ran meanwhile
    assert preemptions.since() == 31


def test_a_weight_sync_that_empties_the_cache_does_not_count():
    scheduler = SimpleNamespace(waiting=[])
    preemptions = Preemptions(scheduler)
    scheduler.waiting = [request("a", 1), request("b", 1)]
    preemptions.disregard()
    assert preemptions.since() == 0


class LosingWorker(RolloutWorker):
    """An engine that reports how many tokens of its cache were given up."""

    async def lost(self):
        return self.meter.read().counts.get("preempted_tokens", 0)


def sampled(model_dir, **engine):
    """Return samples of all prompts from a cache of eight whole ones, and the tokens that were given up."""
    world = OnALoop()
    settings = RolloutConfig(max_num_seqs=32, enforce_eager=True, kv_cache_gib=0.004, engine=engine)
    spec = EngineSpec(settings, WeightSyncConfig(), ModelConfig(path="tiny"), str(model_dir), 256, seed=0)
    rollouts = RolloutPool(spec, ACTORS, worker=LosingWorker)
    world.run(rollouts.ready())
    seeds = list(range(16))
    sampling = Sampling(max_new_tokens=220, lengths=[60 + 10 * seed for seed in seeds])

    async def together():
        asked = (rollouts.sample(p, seeds=seeds, sampling=sampling) for p in PROMPTS)
        return [await group for group in await asyncio.gather(*asked)]

    try:
        groups = world.run(together())
        return groups, ray.get(rollouts.workers[0].lost.remote())
    finally:
        world.run(rollouts.shutdown())
        world.loop.close()


@pytest.mark.machine
@pytest.mark.slow
def test_cache_kept_free_for_growth_changes_no_sample_and_fewer_tokens_are_lost(ray_cluster, tiny_model):
    plain, lost = sampled(tiny_model, watermark=0.0)
    own, less = sampled(tiny_model)
    assert all(same(a, b) for a, b in zip(plain, own, strict=True))
    assert 0 < less < lost
