"""Two real engines and a real policy rank: an engine is killed during sampling and during a transfer."""

import asyncio
import os
import signal
import threading
import time

import pytest

import actors.transfer.vllm_receiver
from actors.weight_sync import WeightSync
from actors.workers.rollout import RolloutWorker
from grpo_dist.config import WeightSyncConfig
from grpo_dist.errors import TransferLost
from grpo_dist.types import Sampling
from tests.support.engines import TwoEngines, on_the_loop, world_of
from tests.support.patience import HANG_S
from tests.support.real_engine import PROMPTS, difference, same

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.long]

SEEDS = [1, 2, 3, 4]
SAMPLING = Sampling(max_new_tokens=100)


class MortalWorker(RolloutWorker):
    """An engine that dies after it received a part of the next weights, or as it joins a transfer group."""

    _dies_as_it_joins = False

    async def die_as_it_joins(self):
        self._dies_as_it_joins = True

    async def open_transfer(self, backend, seats, timeout_s, *, file=None):
        if self._dies_as_it_joins:
            os.kill(os.getpid(), signal.SIGKILL)
        await super().open_transfer(backend, seats, timeout_s, file=file)

    async def process(self):
        return os.getpid()

    async def hold_after(self, steps):
        """Block after ``steps`` steps, with requests in flight, until the process is killed."""
        step, self._held = self._engine._step, threading.Event()
        remaining = iter(range(steps))

        def held_step():
            if next(remaining, None) is None:
                self._held.set()
                time.sleep(HANG_S)
            step()

        self._engine._step = held_step

    async def is_held(self):
        return self._held.is_set()

    async def die_of_the_second_bucket(self):
        buckets, keep = [], actors.transfer.vllm_receiver.copy_unloaded

        def count(model, bucket):
            keep(model, bucket)
            buckets.append(bucket)
            if len(buckets) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        actors.transfer.vllm_receiver.copy_unloaded = count


class World(TwoEngines):
    def __init__(self, model_dir):
        super().__init__(model_dir, WeightSyncConfig(bucket_mb=1), SEEDS, SAMPLING, engine=MortalWorker)

    async def sample_all(self):
        return await self.groups_of(PROMPTS, SEEDS, SAMPLING)

    async def move(self, seed):
        """Change the weights of the policy and of the trainer that engines are compared with."""
        self.follow(await self.policy.ranks[0].move.remote(seed))

    async def push_and_check(self, version):
        """Push new weights as ``version``; both engines get them."""
        await self.move(version)
        await self.sync.push(version)
        await self.check(version)

    async def check(self, version):
        """Assert that both engines hold the policy's weights under ``version``."""
        groups = await self.sample_on_both()
        assert same(*groups)
        for group in groups:
            self.check_group(group, version)

    def check_group(self, group, version):
        assert all((r.policy_versions == version).all() for r in group)
        assert difference(self.model, PROMPTS[0], group) < 1e-5


world = world_of(World)


@on_the_loop
async def test_requests_of_a_killed_engine_give_the_same_samples(world):
    await world.move(1)
    await world.sync.push(1)
    undisturbed = await world.sample_all()
    victim = world.rollouts.workers[0]
    process = await victim.process.remote()
    await victim.hold_after.remote(20)
    under_way = asyncio.create_task(world.sample_all())
    while not await victim.is_held.remote():
        await asyncio.sleep(0.02)
    assert world.rollouts.team.load_balancer._loads[0].sequences  # it has work
    os.kill(process, signal.SIGKILL)
    disturbed = await under_way
    assert all(same(a, b) for a, b in zip(undisturbed, disturbed, strict=True))
    await world.check(1)
    await world.push_and_check(2)


@on_the_loop
async def test_an_engine_killed_in_mid_transfer_is_skipped_and_gets_the_weights_later(world):
    await world.check(2)
    survivor = world.rollouts.workers[1]
    await world.rollouts.workers[0].die_of_the_second_bucket.remote()
    await world.move(3)
    metrics = await world.sync.push(3)  # long before its deadline
    assert metrics["sync/bytes"] > 0
    assert world.rollouts.team.alive() == [survivor]
    group = await world.sample_on(survivor)
    world.check_group(group, 3)
    await world.check(3)
    await world.push_and_check(4)


@on_the_loop
async def test_weights_sent_after_an_update_get_the_next_version(world):
    """The rank runs the send after the queued update, so it sends the weights of the next push."""
    await world.move(5)
    world.policy.updates += 1
    worker = world.rollouts.workers[0]
    await world.sync.catch_up(worker)
    group = await world.sample_on(worker)
    world.check_group(group, 5)
    await world.sync.push(5)
    await world.check(5)


@on_the_loop
async def test_a_broken_connection_is_reopened_once(world):
    """No process is lost: a new group sends the weights again. A second break is an error."""
    rank = world.policy.ranks[0]
    await rank.cut_transfers.remote(1)
    world.sync._opened.clear()
    await world.push_and_check(6)
    await rank.cut_transfers.remote(2)
    world.sync._opened.clear()
    with pytest.raises(TransferLost, match="a process of the transfer group is gone"):
        await world.sync.push(7)
    assert world.rollouts.team.restarted() == 2  # by the tests before
    await rank.cut_transfers.remote(0)
    await world.sync.push(7)


@on_the_loop
async def test_an_engine_killed_before_it_joins_the_reopened_group_is_skipped(world):
    """Rank 0 does not wait for it."""
    survivor, victim = world.rollouts.workers
    await victim.die_as_it_joins.remote()
    world.sync._opened.clear()
    await world.move(8)
    await world.sync.push(8)  # long before its deadline
    assert world.rollouts.team.alive() == [survivor] and world.rollouts.team.restarted() == 1
    await world.check(8)


@on_the_loop
async def test_weights_of_a_lost_policy_are_replaced_by_the_weights_of_the_new_one(world):
    """All engines hold version 8 when the policy is lost; its replacement sends version 3 again."""
    await world.move(8)
    workers = world.rollouts.workers
    await asyncio.gather(*(worker.begin_update.remote() for worker in workers))
    await world.sync._open(workers)
    await world.sync._send(world.sync._group, workers)
    await world.rollouts.abandon()
    settings = WeightSyncConfig(bucket_mb=1)
    world.sync = await WeightSync.connect(world.policy, world.rollouts, settings, timeout_s=HANG_S)
    await world.move(9)
    await world.sync.push(3)
    await world.check(3)


@on_the_loop
async def test_a_wrong_checksum_still_ends_the_run(world):
    """Last in this file: the engines are unusable afterwards."""
    await world.policy.ranks[0].corrupt_next_transfer.remote()
    with pytest.raises(Exception, match=r"received bytes with checksum \d+, the policy sent \d+"):
        await world.sync.push(8)
    assert len(world.rollouts.team.alive()) == 2 and world.rollouts.team.restarted() == 0
