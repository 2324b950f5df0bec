"""Which environment worker an episode gets; workers are names here."""

import asyncio

import pytest

from actors.workers import episodes
from actors.workers.environment import EnvironmentAddresses
from actors.workers.episodes import WorkersOfEpisodes
from tests.support.patience import HANG_S


def of(*workers, number=1, failure=""):
    found = WorkersOfEpisodes()
    found.use(EnvironmentAddresses(number, workers, failure))
    return found


def taken(found, count):
    async def several():
        return [await asyncio.wait_for(found.take(), HANG_S) for _ in range(count)]

    return asyncio.run(several())


def test_each_episode_gets_the_worker_with_the_fewest():
    found = of("a", "b", "c")
    assert sorted(taken(found, 6)) == ["a", "a", "b", "b", "c", "c"]
    found.give_back("b")
    assert taken(found, 1) == ["b"]


def test_older_addresses_that_arrive_late_change_nothing():
    found = of("new", number=3)
    found.use(EnvironmentAddresses(2, ("old",)))
    assert taken(found, 2) == ["new", "new"]


def test_a_worker_that_did_not_answer_gets_no_episode_until_its_replacement_is_there():
    found = of("a", "b")
    found.suspect("a")
    assert taken(found, 3) == ["b"] * 3
    found.use(EnvironmentAddresses(2, ("c", "b")))
    assert taken(found, 3) == ["c"] * 3


def test_an_episode_waits_for_the_replacement_of_the_last_worker(monkeypatch):
    monkeypatch.setattr(episodes, "_RETRY_S", HANG_S)

    async def session():
        found = of("a")
        found.suspect("a")
        waiting = asyncio.create_task(found.take())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        found.use(EnvironmentAddresses(2, ("b",)))
        return await asyncio.wait_for(waiting, HANG_S)

    assert asyncio.run(session()) == "b"


def test_a_worker_that_the_driver_does_not_replace_is_tried_again(monkeypatch):
    """The network failed, and not the worker: no new addresses will come."""
    monkeypatch.setattr(episodes, "_RETRY_S", 0.01)
    found = of("a")
    found.suspect("a")
    assert taken(found, 1) == ["a"]


def test_episodes_that_wait_get_the_error_that_ended_the_role(monkeypatch):
    monkeypatch.setattr(episodes, "_RETRY_S", HANG_S)

    async def session():
        found = of()
        waiting = asyncio.create_task(found.take())
        await asyncio.sleep(0)
        found.use(EnvironmentAddresses(2, (), "environment-0 is lost after 3 restart(s)"))
        await asyncio.wait_for(waiting, HANG_S)

    with pytest.raises(RuntimeError, match="environments: environment-0 is lost after 3 restart"):
        asyncio.run(session())
