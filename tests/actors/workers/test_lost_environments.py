"""Environment workers and engines that are killed or stopped in mid-episode."""

import asyncio
import os
import signal

import pytest

from grpo_dist.config import RestartsConfig
from grpo_dist.errors import WorkerLost
from tests.support.patience import HANG_S
from tests.support.real_episodes import EpisodeWorld, equal, prompt

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.long]

PROMPTS = [prompt("a", turns=4), prompt("bcd", turns=3)]


@pytest.fixture(scope="module")
def world(ray_cluster, tiny_model):
    restarts = RestartsConfig(backoff_s=0.05, hang_s=HANG_S, max_per_worker=6)
    stopped = restarts.model_copy(update={"hang_s": 10.0})  # slow workers answer within it
    world = EpisodeWorld(tiny_model, engines=2, trains=False, restarts=restarts, of_environments=stopped)
    yield world
    world.close()


async def replaced(team, number):
    """Wait until ``number`` workers were replaced and all serve. A loss may be noticed after the samples have
    arrived, since other workers took them over.
    """
    count = team.restarted()
    while count < number or not team.is_whole:
        team.check()
        await asyncio.sleep(0.05)
        count += team.restarted()
    assert count == number


async def held_sampling(world):
    """Sample ``PROMPTS`` in a task; return it once every environment holds its first answer back."""
    await world.hold()
    sampling = asyncio.create_task(world.sample_all(PROMPTS))
    await world.until_waiting(8, 1)
    return sampling


def same_samples(world, disturb):
    """Sample, then again while ``disturb`` acts on the held episodes and awaits them; both must agree."""

    async def session():
        undisturbed = await world.sample_all(PROMPTS)
        return undisturbed, await disturb(await held_sampling(world))

    undisturbed, disturbed = world.run(session())
    return all(equal(a, b) for a, b in zip(undisturbed, disturbed, strict=True))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_episodes_of_a_lost_worker_begin_again_and_give_the_same_samples(world, number):
    async def session():
        undisturbed = await world.sample_all(PROMPTS)
        victim, other = world.environments.workers
        sampling = await held_sampling(world)
        assert await victim.running.remote() and await other.running.remote()
        process = await victim.process.remote()
        await other.hold.remote(False)
        os.kill(process, number)
        disturbed = await sampling
        await replaced(world.environments.team, 1)
        assert world.environments.workers[0] is not victim
        served = await asyncio.gather(*(world.sample_all(PROMPTS) for _ in range(2)))
        return undisturbed, [disturbed, *served]

    undisturbed, later = world.run(session())
    for groups in later:
        assert all(equal(a, b) for a, b in zip(undisturbed, groups, strict=True))
    assert world.environments.team.restarted() == 0


def test_episodes_wait_for_replacements_that_come_late_when_no_worker_is_left(world):
    """As with the default of one worker: a dead one is tried once, however long its replacement takes."""

    async def kill_all(sampling):
        budgets = world.environments.team._budgets
        configured = [budget._settings for budget in budgets]
        for budget in budgets:
            budget._settings = budget._settings.model_copy(update={"backoff_s": 5.0})
        for worker in list(world.environments.workers):
            os.kill(await worker.process.remote(), signal.SIGKILL)
        disturbed = await sampling
        await replaced(world.environments.team, 2)
        for budget, settings in zip(budgets, configured, strict=True):
            budget._settings = settings
        return disturbed

    assert same_samples(world, kill_all)


def test_the_replacement_of_an_engine_gets_the_addresses_and_the_old_episodes_end(world):
    async def kill_engines(sampling):
        for engine in list(world.rollouts.workers):
            os.kill(await engine.process.remote(), signal.SIGKILL)
        while await world.running():  # episodes of lost engines
            await asyncio.sleep(0.05)
        await world.hold(False)
        disturbed = await sampling
        while await world.running():  # their ends are collected
            await asyncio.sleep(0.05)
        return disturbed

    assert same_samples(world, kill_engines)
    assert world.rollouts.team.restarted() == 2


def test_an_episode_that_kills_three_workers_has_failed_and_the_role_has_not(world):
    async def session():
        (failed,) = await world.sample(prompt("poison", kills=True), seeds=[1])
        await replaced(world.environments.team, 3)
        return failed, await world.sample_all(PROMPTS)

    failed, groups = world.run(session())
    assert failed.finish_reason == "error" and len(failed.turns) == 1
    assert failed.turns[0].observation.startswith("3 environment workers were lost with this episode (")
    assert {r.finish_reason for group in groups for r in group} == {"stop"}


def test_without_a_worker_to_replace_the_last_one_sampling_ends_with_the_reason(world):
    """Last in this file: the role has failed afterwards."""

    async def session():
        sampling = await held_sampling(world)
        for budget in world.environments.team._budgets:
            budget._settings = budget._settings.model_copy(update={"max_per_worker": 0})
        os.kill(await world.environments.workers[0].process.remote(), signal.SIGKILL)
        await world.environments.team.failed.wait()
        await world.environments.workers[1].hold.remote(False)
        with pytest.raises(WorkerLost, match=r"environment-0 is lost .*max_per_worker"):
            await sampling
            await world.sample_all(PROMPTS)  # if the other worker took the episodes over

    world.run(session())
