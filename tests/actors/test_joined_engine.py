"""An engine with devices of its own joins one on those of the policy: both get every version of its weights,
in a group each, whatever becomes of the other's. A real policy rank and two real engines.
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
    """An engine that says which group it is in."""

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
        found = []
        for worker in self.rollouts.team.alive():
            found.append(await worker.sample.remote(PROMPTS[0], [1, 2, 3], SAMPLING))
        assert all(set(r.policy_versions) == {self.version} for group in found for r in group)
        return found

    async def ports(self):
        return [await worker.port.remote() for worker in self.rollouts.team.alive()]


world = world_of(Joined)


@on_the_loop
async def test_both_have_the_weights_of_each_version_in_groups_that_stay_open(world):
    alone = await world.push()
    first, _ = await world.samples(), await world.join()
    own, joined = await world.samples()  # it joins with the weights of the last push
    assert same(own, joined) and same(own, first[0])
    both = await world.push()
    assert both["sync/bytes"] == 2 * alone["sync/bytes"]
    ports = await world.ports()
    assert len(set(ports)) == 2
    await world.push()
    assert await world.ports() == ports
    own, joined = await world.samples()
    assert same(own, joined) and not same(own, first[0])


@on_the_loop
async def test_the_one_that_joined_is_lost_and_the_others_group_stays_as_it_is(world):
    joined = world.rollouts.workers[1]
    before = await world.ports()
    os.kill(await joined.process.remote(), signal.SIGKILL)
    await world.push()
    assert len(world.rollouts.team.alive()) == 1
    await world.samples()
    await world.join()
    await world.push()
    own, again = await world.samples()
    assert same(own, again)
    assert before[1] not in await world.ports()


@on_the_loop
async def test_the_group_on_the_policys_devices_is_opened_again_as_that(world):
    """After a connection was lost: on GPUs a group as for an engine elsewhere could not be opened."""
    group = world.sync._group
    await world.policy.ranks[0].cut_transfers.remote(1)
    world.sync._opened.clear()
    await world.push()
    assert same(*await world.samples())
    assert group.on_ranks == {world.rollouts.workers[0]: [0]}
    for worker, ranks in zip(world.rollouts.workers, ({0}, set()), strict=True):
        reopened = await group.reopen([worker], name=group.name, timeout_s=HANG_S)
        assert isinstance(reopened, TransferGroup)
        assert {rank for own in reopened.on_ranks.values() for rank in own} == ranks
