"""The end of a prompt, computed once for all of its samples: by hand, and in a real engine."""

import asyncio
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import ray

from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutPool, RolloutWorker
from actors.workers.shared_tails import SharedTails
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.types import Prompt, Sampling
from tests.support.real_engine import ACTORS, OnALoop, same

PROMPT = list(range(39))  # a block of 32, 6 tokens that samples can share, and the last


class Scheduler:
    """A scheduler with blocks of 32 tokens, whose steps are made by hand. A block is (request, number)."""

    def __init__(self):
        self.block_size, self.waiting, self.tables = 32, [], {}
        manager = SimpleNamespace(req_to_blocks=self.tables)
        self.kv_cache_manager = SimpleNamespace(
            get_computed_blocks=self.find,
            coordinator=SimpleNamespace(single_type_managers=[manager]),
            prefix_cache_lookup_enabled=lambda request: True,
            create_kv_cache_blocks=lambda blocks: SimpleNamespace(blocks=blocks),
        )
        self.full = 0  # full blocks of the prompt in the cache

    def find(self, request):
        return SimpleNamespace(blocks=([("full", i) for i in range(self.full)],)), 32 * self.full, 0

    def add(self, name, prompt=PROMPT):
        ended = []
        self.waiting.append(
            SimpleNamespace(
                request_id=name, num_prompt_tokens=len(prompt), prompt_token_ids=prompt,
                num_computed_tokens=0, is_finished=lambda: bool(ended), end=lambda: ended.append(True),
            )
        )  # fmt: skip
        return True

    def step(self):
        """Admit all waiting requests; return the cached blocks of each, and how many tokens they hold."""
        admitted, self.waiting = self.waiting, []
        cached = [self.kv_cache_manager.get_computed_blocks(request)[:2] for request in admitted]
        for request in admitted:
            self.tables[request.request_id] = [(request.request_id, i) for i in range(2)]
            request.num_computed_tokens = request.num_prompt_tokens
        self.full = 1
        self.admitted = admitted
        return [(blocks.blocks[0], count) for blocks, count in cached]


def started(names="abc", prompt=PROMPT):
    scheduler = Scheduler()
    tails = SharedTails(scheduler)
    for name in names:
        tails.add(name, prompt, lambda name=name: scheduler.add(name, prompt))
    return scheduler, tails


def test_the_first_sample_goes_ahead_and_the_others_begin_with_its_last_block():
    scheduler, tails = started()
    assert scheduler.step() == [([], 0)]
    assert not scheduler.waiting
    tails.release(())
    assert scheduler.step() == [([("full", 0), ("a", 1)], 38)] * 2
    tails.release(())
    tails.add("d", PROMPT, lambda: scheduler.add("d"))
    assert scheduler.step() == [([("full", 0), ("a", 1)], 38)], "a later sample waits for no other"


def test_another_sample_shares_its_blocks_if_the_first_has_ended_or_lost_its_cache():
    scheduler, tails = started("ab")
    scheduler.step()
    (first,) = scheduler.admitted
    tails.release(())
    scheduler.step()
    first.num_computed_tokens = 0  # preempted: others have its blocks
    del scheduler.tables["a"]
    scheduler.add("c")
    assert scheduler.step() == [([("full", 0), ("b", 1)], 38)]


def test_held_samples_are_abandoned_with_the_others_and_a_refused_one_holds_no_other():
    scheduler, tails = started()
    assert tails.abandon() == ["b", "c"]
    tails.add("x", PROMPT, lambda: False)
    tails.add("y", PROMPT, lambda: scheduler.add("y"))
    assert [request.request_id for request in scheduler.waiting] == ["a", "y"]


class CountingWorker(RolloutWorker):
    """Counts the tokens that its engine computes."""

    shares = True
    computed = 0

    async def start(self, environments=None):
        if not self.shares:
            sys.modules[RolloutWorker.__module__].shares_tails = lambda spec: False
        await super().start(environments)
        scheduler = self._engine._core.scheduler
        schedule = scheduler.schedule

        def counted(*arguments, **options):
            output = schedule(*arguments, **options)
            self.computed += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counted

    async def tokens(self):
        return self.computed


class PlainWorker(CountingWorker):
    """Computes the end of the prompt for every sample."""

    shares = False


PROMPTS = [Prompt(f"p{n}", np.arange(3, 3 + n, dtype=np.int32), "1", "test") for n in (2, 9, 32, 33, 45, 64)]
SEEDS = list(range(8))


def sampled(model_dir, worker):
    """Return samples of all prompts, and the tokens that were computed for them."""
    world = OnALoop()
    settings = RolloutConfig(max_num_seqs=64, enforce_eager=True, kv_cache_gib=0.05)
    spec = EngineSpec(settings, WeightSyncConfig(), ModelConfig(path="tiny"), str(model_dir), 128, seed=0)
    rollouts = RolloutPool(spec, ACTORS, worker=worker)
    world.run(rollouts.ready())

    async def together():
        sampling = Sampling(max_new_tokens=20, lengths=[6 + seed for seed in SEEDS])
        groups = [await rollouts.sample(p, seeds=SEEDS, sampling=sampling) for p in PROMPTS]
        return await asyncio.gather(*groups)

    try:
        return world.run(together()), ray.get(rollouts.workers[0].tokens.remote())
    finally:
        world.run(rollouts.shutdown())
        world.loop.close()


@pytest.mark.machine
@pytest.mark.slow
def test_samples_that_share_the_end_of_a_prompt_equal_samples_that_compute_it_to_the_bit(
    ray_cluster, tiny_model
):
    plain, every = sampled(tiny_model, PlainWorker)
    shared, fewer = sampled(tiny_model, CountingWorker)
    assert all(same(a, b) for a, b in zip(plain, shared, strict=True))
    saved = [(len(p.token_ids) - 1) % 32 * (len(SEEDS) - 1) for p in PROMPTS]
    assert every - fewer == sum(saved)
