"""Evaluation engines and a real policy rank: snapshots that no update changes, corruption, a lost engine."""

import asyncio
import os
import signal

import pytest
import ray

from grpo_dist.policy.snapshots import WEIGHTS
from tests.support.engines import EvaluatedWorld, world_of
from tests.support.real_engine import same

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.long]

world = world_of(EvaluatedWorld)


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

    sampled = world.run(lose())
    assert all(same(a, b) for a, b in zip(expected, sampled, strict=True))
    assert world.difference(sampled, weights) < 1e-5


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
    assert world.difference(world.run(world.sample_all()), weights) < 1e-5


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
