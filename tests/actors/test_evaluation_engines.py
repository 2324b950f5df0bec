"""Engines of evaluation and a real policy rank: snapshots that no update changes, damage, a lost engine."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from actors.evaluation_engines import EvaluationEngines
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutWorker
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.config import LoRAConfig, ModelConfig, PolicyConfig, RestartsConfig, RolloutConfig
from grpo_dist.config import WeightSyncConfig as SyncConfig
from grpo_dist.policy.snapshots import WEIGHTS
from grpo_dist.types import Sampling
from tests.support.drawn import FILE
from tests.support.patience import HANG_S
from tests.support.real_engine import ACTORS, PROMPTS, OnALoop, difference, one_rank, same
from tests.support.two_engines import world_of

pytestmark = [pytest.mark.machine, pytest.mark.family("engines", FILE), pytest.mark.long]

SEEDS, SAMPLING = [1, 2, 3], Sampling(max_new_tokens=48)


class KillableWorker(RolloutWorker):
    """An engine that says which process it is."""

    async def process(self):
        return os.getpid()


class World(OnALoop):
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


world = world_of(World)


def test_an_engine_samples_the_weights_of_its_snapshot_whatever_the_policy_does(world, tmp_path):
    weights = world.move(1)
    world.run(world.engines.snapshot(tmp_path / "step_000003", 3))
    world.move(2)  # while the file is written
    world.run(world.engines.written())
    assert world.run(world.engines.load(tmp_path / "step_000003"))
    sampled = world.run(world.sample_all())
    assert world.difference(sampled, weights) < 1e-5
    assert {int(v) for rollouts in sampled for r in rollouts for v in r.policy_versions} == {3}
    assert world.run(world.engines.load(tmp_path / "step_000003"))  # a resumed run loads it again
    again = world.run(world.sample_all())
    assert all(same(a, b) for a, b in zip(sampled, again, strict=True))


def test_a_lost_engine_is_replaced_by_one_with_the_same_snapshot(world, tmp_path):
    weights = world.move(3)
    world.run(world.load(tmp_path, 5))
    world.move(4)
    expected = world.run(world.sample_all())

    async def lose():
        sampling = asyncio.create_task(world.sample_all())
        os.kill(await world.rollouts.workers[0].process.remote(), signal.SIGKILL)
        return await sampling

    found = world.run(lose())
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))
    assert world.difference(found, weights) < 1e-5


def test_an_engine_lost_between_evaluations_is_replaced_though_its_snapshot_is_gone(world, tmp_path):
    """Its replacement asked for the deleted file, again and again, until no restart was left."""
    world.move(5)
    world.run(world.load(tmp_path / "first", 7))
    world.run(world.engines.discard(tmp_path / "first"))

    async def replaced():
        lost = await world.rollouts.workers[0].process.remote()
        os.kill(lost, signal.SIGKILL)
        team = world.rollouts.team
        await team.find_dead(list(team.alive()))
        while not team.alive():
            team.check()
            await asyncio.sleep(0.1)
        return lost != await team.alive()[0].process.remote()

    assert world.run(replaced())
    weights = world.move(6)
    world.run(world.load(tmp_path / "second", 8))
    found = world.run(world.sample_all())
    assert world.difference(found, weights) < 1e-5


def test_a_damaged_snapshot_is_refused(world, tmp_path):
    world.run(world.engines.snapshot(tmp_path, 6))
    assert not world.engines.has_snapshot(tmp_path) and not world.run(world.engines.load(tmp_path))
    world.run(world.engines.written())
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    with pytest.raises(ray.exceptions.RayTaskError, match="received bytes with checksum"):
        world.run(world.engines.load(tmp_path))
    (tmp_path / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(ray.exceptions.RayTaskError, match="more bytes and found"):
        world.run(world.engines.load(tmp_path))
    (tmp_path / WEIGHTS).write_bytes(whole)
    assert world.run(world.engines.load(tmp_path))
    world.run(world.engines.discard(tmp_path))
    assert not tmp_path.exists()


@pytest.mark.evidence
@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_a_snapshot_of_adapters_is_the_model_with_them(ray_cluster, tiny_model, tmp_path, sync):
    world = World(tiny_model, PolicyConfig(zero_stage=2, lora=LoRAConfig(rank=4, sync=sync)))
    try:
        world.move(7)
        sampled = world.run(world.load(tmp_path, 1)) or world.run(world.sample_all())
        world.run(world.policy.export(tmp_path / "model", tokenizer_dir=tiny_model))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        assert world.difference(sampled, exported.state_dict()) < 1e-5
    finally:
        world.close()
