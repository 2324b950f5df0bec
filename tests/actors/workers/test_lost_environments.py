"""Environment workers and engines that are killed or stopped in mid-episode."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest
from ray.exceptions import RayActorError

from grpo_dist.config import RestartsConfig
from grpo_dist.errors import WorkerLost
from tests.support.real_episodes import EpisodeWorld, equal, prompt

pytestmark = [pytest.mark.machine, pytest.mark.long]

PROMPTS = [prompt("a", turns=4), prompt("bcd", turns=3)]


@pytest.fixture(scope="module")
def world(ray_cluster, tiny_model):
    restarts = RestartsConfig(backoff_s=0.05, health_s=0.5, hang_s=5.0, max_per_worker=2)
    world = EpisodeWorld(tiny_model, engines=2, trains=False, restarts=restarts)
    yield world
    world.close()


async def whole(team):
    while not team.is_whole:
        team.check()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_episodes_of_a_lost_worker_begin_again_and_give_the_same_samples(world, number):
    async def session():
        undisturbed = await world.sample_all(PROMPTS)
        victim, other = world.environments.workers
        await world.hold()
        sampling = asyncio.create_task(world.sample_all(PROMPTS))
        await world.until_waiting(8, 1)
        of_other = await other.running.remote()
        assert await victim.running.remote() and of_other
        process = await victim.process.remote()
        await other.hold.remote(False)
        os.kill(process, number)
        disturbed = await sampling
        await whole(world.environments.team)
        assert world.environments.workers[0] is not victim
        served = await asyncio.gather(*(world.sample_all(PROMPTS) for _ in range(2)))
        return undisturbed, [disturbed, *served]

    undisturbed, later = world.run(session())
    for groups in later:
        assert all(equal(a, b) for a, b in zip(undisturbed, groups, strict=True))
    assert world.environments.team.restarted() == 1


def test_the_replacement_of_an_engine_gets_the_addresses_and_the_old_episodes_end(world):
    async def session():
        undisturbed = await world.sample_all(PROMPTS)
        await world.hold()
        sampling = asyncio.create_task(world.sample_all(PROMPTS))
        await world.until_waiting(8, 1)
        for engine in list(world.rollouts.workers):
            os.kill(await engine.process.remote(), signal.SIGKILL)
        while await world.running():  # of engines that are gone
            await asyncio.sleep(0.05)
        await world.hold(False)
        disturbed = await sampling
        assert await world.running() == []
        return undisturbed, disturbed

    undisturbed, disturbed = world.run(session())
    assert all(equal(a, b) for a, b in zip(undisturbed, disturbed, strict=True))
    assert world.rollouts.team.restarted() == 2


def test_without_a_worker_to_replace_the_last_one_sampling_ends_with_the_reason(world):
    """Last in this file: the role has failed afterwards."""

    async def session():
        await world.hold()
        sampling = asyncio.create_task(world.sample_all(PROMPTS))
        await world.until_waiting(8, 1)
        while world.environments.team._failure is None:
            for worker in world.environments.team.alive():
                with suppress(RayActorError):  # dead, and not noticed yet
                    os.kill(await worker.process.remote(), signal.SIGKILL)
            await asyncio.sleep(0.2)
        with pytest.raises(WorkerLost, match=r"environment-\d is lost .*max_per_worker"):
            await sampling

    world.run(session())
