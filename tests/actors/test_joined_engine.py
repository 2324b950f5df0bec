"""An engine on separate devices joins one that is colocated with the policy: each gets every version of the
weights in a separate group, whatever happens to the other. A real policy rank and two real engines.
"""

import os
import signal
from dataclasses import replace

import pytest
import ray

from actors.lifecycle.team import GuestSpec
from actors.weight_sync import TransferGroup, WeightSync
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutPool, RolloutWorker
from grpo_dist.config import ModelConfig, RestartsConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.types import Sampling
from tests.support.engines import on_the_loop, world_of
from tests.support.patience import HANG_S
from tests.support.real_engine import ACTORS, PROMPTS, OnALoop, one_rank, same

pytestmark = [pytest.mark.machine, pytest.mark.slow]

SAMPLING = Sampling(max_new_tokens=16)
# Each rank sends to the process on its device, as `ipc` does on GPUs.
SETTINGS = WeightSyncConfig(bucket_mb=1, backend="shared_memory")


class SeatedWorker(RolloutWorker):
    """An engine that reports its transfer group."""

    async def open_transfer(self, backend, seats, timeout_s, *, file=None):
        self._seats = seats
        await super().open_transfer(backend, seats, timeout_s, file=file)

    async def port(self):
        return self._seats[0].port

    async def process(self):
        return os.getpid()


class Joined(OnALoop):
    """The engine on the policy's device, the policy, and their sync; the other engine joins later."""

    def __init__(self, model_dir):
        super().__init__()
        self.run(self._start(model_dir))

    async def _start(self, model_dir):
        model = ModelConfig(path="tiny")
        rollout = RolloutConfig(
            num_workers=1, max_workers=2, max_num_seqs=16, enforce_eager=True, kv_cache_gib=0.25
        )
        spec = EngineSpec(rollout, SETTINGS, model, str(model_dir), max_length=256, seed=0)
        actors = replace(ACTORS, restarts=RestartsConfig(backoff_s=0.1), start_s=HANG_S)
        self.rollouts = RolloutPool(spec, replace(actors, guests=GuestSpec(1, 0, 0)), worker=SeatedWorker)
        self.policy, self.version = one_rank(model, model_dir), 0
        await self.rollouts.ready()
        await self.policy.ready()
        self.sync = await WeightSync.connect(
            self.policy, self.rollouts, SETTINGS, colocated_ranks=[0], timeout_s=HANG_S
        )

    async def join(self):
        await self.rollouts.team.join(1, ray.get_runtime_context().get_node_id())

    async def push(self):
        self.version += 1
        await self.policy.ranks[0].move.remote(self.version)
        return await self.sync.push(self.version)

    async def samples(self):
        """Return the samples of each serving engine; they have the last version."""
        groups = [await w.sample.remote(PROMPTS[0], [1, 2, 3], SAMPLING) for w in self.rollouts.team.alive()]
        assert all(set(r.policy_versions) == {self.version} for group in groups for r in group)
        return groups

    async def ports(self):
        return [await worker.port.remote() for worker in self.rollouts.team.alive()]


world = world_of(Joined)


@on_the_loop
async def test_both_have_the_weights_of_each_version_in_groups_that_stay_open(world):
    alone = await world.push()
    first, _ = await world.samples(), await world.join()
    colocated, joined = await world.samples()  # it joins with the weights of the last push
    assert same(colocated, joined) and same(colocated, first[0])
    both = await world.push()
    assert both["sync/bytes"] == 2 * alone["sync/bytes"]
    ports = await world.ports()
    assert len(set(ports)) == 2
    await world.push()
    assert await world.ports() == ports
    colocated, joined = await world.samples()
    assert same(colocated, joined) and not same(colocated, first[0])


@on_the_loop
async def test_a_lost_joined_engine_leaves_the_group_of_the_other_as_it_is(world):
    joined = world.rollouts.workers[1]
    before = await world.ports()
    os.kill(await joined.process.remote(), signal.SIGKILL)
    await world.push()
    assert len(world.rollouts.team.alive()) == 1
    await world.samples()
    await world.join()
    await world.push()
    colocated, rejoined = await world.samples()
    assert same(colocated, rejoined)
    assert before[1] not in await world.ports()


@on_the_loop
async def test_the_group_on_the_policys_devices_is_reopened_on_them(world):
    """After a lost connection. On GPUs, a group like the one for a remote engine could not be opened."""
    group = world.sync._group
    await world.policy.ranks[0].cut_transfers.remote(1)
    world.sync._opened.clear()
    await world.push()
    assert same(*await world.samples())
    assert group.on_ranks == {world.rollouts.workers[0]: [0]}
    for worker, ranks in zip(world.rollouts.workers, ({0}, set()), strict=True):
        reopened = await group.reopen([worker], name=group.name, timeout_s=HANG_S)
        assert isinstance(reopened, TransferGroup)
        assert {rank for indices in reopened.on_ranks.values() for rank in indices} == ranks
