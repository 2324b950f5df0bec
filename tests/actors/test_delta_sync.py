"""Weight deltas between a real policy rank and two real engines: bit-equal to whole weights, always."""

import asyncio
import os
import signal

import pytest
import torch

from actors.workers.rollout import RolloutWorker
from grpo_dist.config import WeightSyncConfig
from grpo_dist.types import Sampling
from tests.support.engines import TwoEngines, on_the_loop, world_of
from tests.support.real_engine import PROMPTS, MovingWorker, difference, same

pytestmark = [pytest.mark.machine, pytest.mark.slow]

SEEDS = [1, 2, 3]
SAMPLING = Sampling(max_new_tokens=24)
SETTINGS = WeightSyncConfig(bucket_mb=1, deltas=True)


class NudgedWorker(MovingWorker):
    """A rank whose weights change in a few elements, as in bfloat16 at a small learning rate."""

    def nudge(self, seed, share, only=""):
        """Change ``share`` of the elements of parameters whose name contains ``only``; return all."""
        generator = torch.Generator().manual_seed(seed)
        named = dict(self._trainer.engine.module.model.named_parameters())
        with torch.no_grad():
            for name, parameter in named.items():
                moved = torch.rand(parameter.shape, generator=generator) < share
                step = torch.randn(parameter.shape, generator=generator) * 0.05
                if only in name:
                    parameter.add_(step * moved)
        return {n: p.detach().clone() for n, p in named.items()}

    def corrupt_next_changes(self, call):
        """Flip a bit in the next transfer: in the size table (``call`` 1) or the first delta bucket (2)."""
        transport, calls = self._transports["rollout"], []
        outgoing = transport.outgoing

        def flip(sizes):
            calls.append(sizes)
            for i, flat in enumerate(outgoing(sizes)):
                yield flat
                if len(calls) == call and i == 0:
                    flat[8] ^= 1
            if len(calls) == call:
                transport.outgoing = outgoing

        transport.outgoing = flip


class WatchedWorker(RolloutWorker):
    """An engine that tests can kill, and whose copy they can corrupt."""

    async def process(self):
        return os.getpid()

    async def die_at_next_stop(self):
        self._dies = True

    async def begin_update(self, *arguments):
        if self.__dict__.get("_dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().begin_update(*arguments)

    async def spoil_copy(self):
        await self._engine.in_workers(spoil)


def spoil(worker):
    worker.weight_transfer_engine.held.slots[0][5] ^= 1


class World(TwoEngines):
    def __init__(self, model_dir):
        super().__init__(model_dir, SETTINGS, SEEDS, SAMPLING, engine=WatchedWorker, rank=NudgedWorker)
        self.version = 0

    async def nudge(self, seed, share=0.01, only=""):
        weights = await self.policy.ranks[0].nudge.remote(seed, share, only)
        self.follow(weights)
        return weights

    async def push(self):
        self.version += 1
        return await self.sync.push(self.version)

    async def check(self):
        """Assert that both engines hold the policy's weights; return what they sample."""
        groups = await self.sample_on_both()
        assert same(*groups)
        assert all((r.policy_versions == self.version).all() for r in groups[0])
        assert difference(self.model, PROMPTS[0], groups[0]) < 1e-5
        return groups[0]

    async def sampled_after_whole_weights(self):
        """Send the same weights whole, as without deltas, and return what the engines sample then."""
        deltas, self.sync._deltas = self.sync._deltas, None
        await self.push()
        self.sync._deltas = deltas
        return await self.check()


world = world_of(World)


@on_the_loop
async def test_engines_with_deltas_sample_what_they_sample_with_whole_weights_to_the_bit(world):
    weights = await world.nudge(0)
    size = sum(w.numel() * 4 for w in weights.values())
    first = await world.push()
    assert first["sync/whole"] == 1 and first["sync/bytes"] == size
    await world.check()
    for seed in range(1, 4):
        await world.nudge(seed)
        metrics = await world.push()
        assert metrics["sync/whole"] == 0 and metrics["sync/mismatches"] == 0
        assert 0.004 < metrics["sync/changed_share"] < 0.011  # share of words; a float32 element has two
        assert metrics["sync/bytes"] < 0.03 * size
        samples = await world.check()
    whole_samples = await world.sampled_after_whole_weights()
    assert same(samples, whole_samples)
    # Weights sent without deltas leave no copy: the next transfer is whole, the one after it a delta.
    await world.nudge(4)
    assert (await world.push())["sync/whole"] == 1
    await world.nudge(5)
    assert (await world.push())["sync/whole"] == 0
    await world.check()


@on_the_loop
async def test_a_copy_or_a_delta_with_a_wrong_bit_is_noticed_and_whole_weights_follow(world):
    for seed, call in ((9, 2), (12, 1)):
        await world.nudge(seed)
        await world.policy.ranks[0].corrupt_next_changes.remote(call)
        metrics = await world.push()
        assert metrics["sync/mismatches"] == 2 and metrics["sync/whole"] == 0
        await world.check()
    await world.rollouts.workers[1].spoil_copy.remote()
    await world.nudge(10)
    assert (await world.push())["sync/mismatches"] == 1
    await world.check()
    await world.nudge(11)
    metrics = await world.push()
    assert metrics["sync/mismatches"] == metrics["sync/whole"] == 0
    await world.check()


@on_the_loop
async def test_engines_get_the_weights_of_the_last_push_from_the_policy_after_all_were_killed(world):
    before = await world.check()
    victims = list(world.rollouts.workers)
    for process in await asyncio.gather(*(w.process.remote() for w in victims)):
        os.kill(process, signal.SIGKILL)
    while any(w in victims for w in world.rollouts.workers) or len(world.rollouts.team.alive()) < 2:
        await asyncio.sleep(0.1)
    assert same(before, await world.check())
    await world.nudge(13)
    assert (await world.push())["sync/whole"] == 0
    await world.check()


@on_the_loop
async def test_an_engine_that_is_lost_while_it_stops_does_not_make_the_transfer_to_the_other_whole(world):
    await world.check()
    other, victim = world.rollouts.workers
    await world.nudge(14)
    await victim.die_at_next_stop.remote()
    metrics = await world.push()
    assert metrics["sync/whole"] == 0 and metrics["sync/mismatches"] == 0
    while world.rollouts.workers[1] is victim or len(world.rollouts.team.alive()) < 2:
        await asyncio.sleep(0.1)
    assert world.rollouts.workers[0] is other
    await world.check()  # the replacement has the weights of the last push
    await world.nudge(15)
    assert (await world.push())["sync/whole"] == 0
    await world.check()
